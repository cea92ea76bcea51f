"""Results first: what has to be brought home of a cluster's runs before its machines go."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from payload.checkpoint_files import checkpoint_step
from payload.errors import ConfigError, TileforgeError
from payload.hints import command
from payload.inventory import ClusterInventory
from payload.orchestrate.cloud.head import Head, ask_head
from payload.orchestrate.cloud.stack import StackOutputs
from payload.orchestrate.mirror import Mirrored, read_mirrored
from payload.orchestrate.runs import all_runs
from payload.results import RunPaths, Summary, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStake:
    """What the cluster's machines would take with them."""

    missing: Sequence[RunPaths]
    """Runs whose copy here lacks something, or that may still be going on."""
    known: Sequence[str]
    """Every run of the cluster that has a copy here."""
    head: Head
    ask: Callable[[], Head] | None
    """Asks the head anew; None where there is none."""

    def names(self) -> str:
        """The runs to collect, for people, and the one that goes on."""
        names = ", ".join(paths.run_id for paths in self.missing) or "nothing is missing here"
        return names + (f"; run {self.head.running} is going on" if self.head.running else "")

    def refuse_while_running(self, *, kept: str, force: str) -> None:
        """Raises ConfigError when a run is going on.

        `kept` says what is not done then, `force` is the command that does it all the same.
        """
        running = self.head.running
        if running is None:
            return
        if running in self.known:
            how = _how_to_stop(running)
        else:
            attach = command("orchestrate", "attach", running, "--inventory", "stack")
            how = f"It was started elsewhere. Stop it there, or here after: {attach}"
        raise ConfigError(f"run {running} is going on, so {kept}. {how} (or lose its end: {force})")

    def bring_home(self, env: Mapping[str, str], *, kept: str, force: str) -> None:
        """Collect the runs. Raises when one cannot be, or goes on; the words are as above.

        The head is asked once more: a run may have begun while the operator was thinking.
        """
        if self.ask is not None:
            replace(self, head=self.ask()).refuse_while_running(kept=kept, force=force)
        for paths in self.missing:
            _collect(paths, env, kept=kept, force=force)


def at_stake(
    cluster: str,
    outputs: StackOutputs | None,
    env: Mapping[str, str],
    *,
    folder: Path,
    runs_dir: Path,
    talk: Console,
) -> AtStake:
    """Look here and ask the head. Without `outputs` the cluster never came up, and has none."""
    copies = _copies(runs_dir, cluster)
    # Of a stack without outputs whatever had this name and results before is gone.
    ask, head = None, Head(is_gone=True)
    if outputs is not None:
        keys = [Path(mirrored.ssh_key) for _, mirrored, _ in copies]
        ask = partial(ask_head, outputs, env, folder=folder, more_keys=keys, talk=talk)
        head = ask()
    missing = []
    for paths, mirrored, inventory in copies:
        if not mirrored.alive and _is_whole(paths, collected=mirrored.collected):
            continue
        if head.has_lost(inventory.head):
            talk.print(f"run {paths.run_id}: the machine that had its results is gone")
        else:
            missing.append(paths)
    known = [paths.run_id for paths, _, _ in copies]
    return AtStake(missing=missing, known=known, head=head, ask=ask)


def _copies(runs_dir: Path, cluster: str) -> list[tuple[RunPaths, Mirrored, ClusterInventory]]:
    found = []
    for paths in all_runs(runs_dir):
        mirrored = read_mirrored(paths)
        if mirrored is None or not paths.inventory.exists():
            continue
        inventory = ClusterInventory.load(paths.inventory)
        if inventory.cluster == cluster:
            found.append((paths, mirrored, inventory))
    return found


def _is_whole(paths: RunPaths, *, collected: str | None) -> bool:
    """Whether all of a run that has ended is here.

    The newest checkpoint of one that failed may be older than its last step, or there is none; what
    was `collected` tells.
    """
    if collected is not None and (not collected or (paths.checkpoints / collected).is_dir()):
        return True
    summary, checkpoint = read_json(Summary, paths.summary), paths.newest_checkpoint()
    if summary is None or checkpoint is None or summary.status == "running":
        return False
    return checkpoint_step(checkpoint) >= summary.steps


def _collect(paths: RunPaths, env: Mapping[str, str], *, kept: str, force: str) -> None:
    # paramiko takes half a second to import.
    from payload.orchestrate.remote_commands import collect

    try:
        collect(argparse.Namespace(runs_dir=paths.root.parent, run=paths.run_id), env)
    except TileforgeError as error:
        why = str(error).rstrip(".")
        again = TileforgeError(
            f"run {paths.run_id} is not brought home, so {kept}: {why}. To go on without its "
            f"results: {force}"
        )
        again.exit_code = error.exit_code
        raise again from None
    mirrored = read_mirrored(paths)
    if mirrored is not None and mirrored.alive:
        raise ConfigError(
            f"run {paths.run_id} is going on, so {kept}. {_how_to_stop(paths.run_id)} "
            f"(or lose its end: {force})"
        )


def _how_to_stop(run_id: str) -> str:
    return f"Stop it first: {command('orchestrate', 'stop', run_id)}"
