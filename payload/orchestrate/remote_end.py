"""The end of a run on a cluster: nothing of it left there, and what it made brought here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from payload.errors import ConfigError, ExitCode, RankLostError, SshUnreachableError, TileforgeError
from payload.hints import run_command
from payload.orchestrate.console import text_console
from payload.orchestrate.ending import say_end
from payload.orchestrate.follow import Asks
from payload.orchestrate.mirror import note_collected
from payload.orchestrate.remote_run import RemoteRun
from payload.results import RunState, Summary, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """What came of it."""

    alive: bool
    """Whether the run goes on, or was started again: its processes and its key stay."""
    checkpoint: Path | None
    """The newest, here; None when there is none yet."""
    left: RankLostError | None
    """Processes that do not end."""


def bring_home(run: RemoteRun, *, talk: Console, at_once: bool = False) -> Home:
    """Every node's logs and the newest checkpoint; of an ended run, also its key taken away.

    Ranks whose supervisor died may save first, but not with `at_once`. What a worker keeps from us
    is said, and hides nothing of the others'. Raises what the head's part ends with.
    """
    try:
        # First what is soon done: the rest may take long enough for someone to start the run again.
        alive, failed = _end_for_good(run, talk=talk, at_once=at_once)
        missed, unfit = _bring_records(run, talk=talk)
        checkpoint = run.collect_checkpoint(say=talk.print)
        if unfit is not None:
            talk.print(f"checkpoint: {checkpoint or 'none yet'}")
            raise unfit
        if not missed and not failed:
            note_collected(run.paths, checkpoint)
    except SshUnreachableError as error:
        raise SshUnreachableError(f"{error} {_how_to_go_on(run)}") from None
    except KeyboardInterrupt:
        talk.print(_how_to_go_on(run))
        raise
    if failed or missed:
        talk.print(f"once it is fixed: {run_command('collect', run.paths)}")
    left = [error for error in failed if isinstance(error, RankLostError)]
    return Home(alive=alive, checkpoint=checkpoint, left=left[0] if left else None)


def _bring_records(
    run: RemoteRun, *, talk: Console
) -> tuple[Mapping[str, TileforgeError], ConfigError | None]:
    """Bring logs and records here; return why some node's are not, and why the copy takes none.

    A copy that cannot be written keeps no checkpoint from coming.
    """
    try:
        look = run.look_at_all()
    except ConfigError as unfit:
        return {}, unfit
    for error in look.missed.values():
        talk.print(f"warning: not all is here: {error}")
    for problem in look.damaged:
        talk.print(f"warning: {problem}")
    return look.missed, None


def say_remote_end(run: RemoteRun, *, arguments: argparse.Namespace, talk: Console) -> int:
    """The end as the local copy has it, and the run's exit code."""
    summary = read_json(Summary, run.paths.summary)
    state = read_json(RunState, run.paths.state)
    if summary is None or state is None or state.exit_class is None:
        talk.print(
            "error: the supervisor is gone without a word (killed, or the head restarted); see "
            f"{run.paths.supervisor_log}"
        )
        return ExitCode.RANK_LOST
    say_end(run.paths, summary=summary, state=state, arguments=arguments, talk=talk)
    if arguments.json:
        text_console(stderr=True).print(f"everything in {run.paths.root}")
    known = {code.label: code for code in ExitCode}
    return known.get(state.exit_class, ExitCode.TRAINING)


def _end_for_good(
    run: RemoteRun, *, talk: Console, at_once: bool
) -> tuple[bool, list[TileforgeError]]:
    """Unless the run is alive, end its processes and remove its key; whether it is, what failed.

    Ctrl-C waits for it: whoever does not come back would leave the key behind.
    """
    failed: list[TileforgeError] = []
    with Asks() as asks:
        for act in (partial(run.end_leftovers, at_once=at_once, say=talk.print), run.remove_key):
            # Asked before each, as a run that was started again needs both.
            if run.is_alive():
                return True, failed
            try:
                act()
            except TileforgeError as error:
                failed.append(error)
                talk.print(f"warning: {error}")
    if not failed:
        talk.print("no process of it is left on any node, nor its key")
    if asks.count:
        raise KeyboardInterrupt
    return False, failed


def _how_to_go_on(run: RemoteRun) -> str:
    return f"What is here stays: {run_command('collect', run.paths)} again goes on from there."
