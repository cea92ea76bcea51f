"""`up`: `pulumi preview`, the operator's yes, `pulumi up`; a failure is named for what it is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.errors import (
    CapacityError,
    ConfigError,
    ExitCode,
    TeardownError,
    TileforgeError,
)
from payload.hints import command
from payload.orchestrate.cloud.endpoints import Endpoints
from payload.orchestrate.cloud.failures import StackBusyError, explain, find_stock_out
from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.machines import StackState, machines_that_go, stack_state
from payload.orchestrate.cloud.need import need_of
from payload.orchestrate.cloud.pulumi_cli import Pulumi
from payload.orchestrate.cloud.results_first import AtStake, at_stake
from payload.orchestrate.cloud.settings import cluster_name, settings, text_list
from payload.orchestrate.cloud.stack import (
    outputs_if_any,
    read_outputs,
    remember,
    remember_plan,
)
from payload.orchestrate.cloud.sweep import confirm, project_of
from payload.orchestrate.cloud.teardown import destroy_and_look
from payload.orchestrate.console import text_console
from payload.orchestrate.keys import make_operator_key, operator_key_path
from payload.results import write_whole

_FORCE = "up --without-collect"
_WORDS = {"kept": "nothing was built", "force": _FORCE}


def up(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Build the cluster, or bring it up to date."""
    talk = text_console(stderr=True)
    pulumi = Pulumi(env, folder=Path.cwd(), stack=arguments.stack)
    known = settings(pulumi)
    zones = text_list(known.get("zones")) if arguments.next_zone else []
    if arguments.next_zone and len(zones) < 2:
        raise ConfigError(
            f"--next-zone: the config has {len(zones)} zone(s). Give more, in the order to try: "
            "pulumi config set --path 'zones[1]' ZONE"
        )
    spot = need_of(known).spot != "false"
    _make_key(pulumi, known, talk=talk)
    before = stack_state(pulumi)
    there = before.machines
    _step(pulumi, "preview", say=talk.print)
    going = machines_that_go(pulumi) if there else []
    results = _Results(pulumi, arguments, env, talk=talk)
    stake = results.look(going)
    if arguments.dry_run:
        talk.print("dry run: nothing was built")
        return ExitCode.OK
    if stake is not None:
        stake.refuse_losses(**_WORDS)
    if not confirm("Build this?", assume_yes=arguments.yes):
        talk.print("nothing was built")
        return ExitCode.OK
    _refuse_if_changed(pulumi, before, kept="nothing was built")
    remember_plan(pulumi, known, folder=Path.cwd())
    if stake is not None:
        stake.bring_home(env, **_WORDS)
    try:
        _build(pulumi, zones, spot=spot, there=there, results=results, talk=talk)
    except StackBusyError:
        # What is there now is being built by somebody else.
        raise
    except TileforgeError as error:
        if there or arguments.keep_on_failure:
            raise _with_words(error, _how_to_remove()) from None
        raise _take_back(error, pulumi, known, arguments, env, talk=talk) from None
    except KeyboardInterrupt:
        talk.print(f"up was interrupted. {_how_to_remove()}")
        raise
    outputs = read_outputs(pulumi)
    remember(outputs, folder=Path.cwd())
    name = f"stack:{arguments.stack}" if arguments.stack else "stack"
    talk.print(
        f"cluster {outputs.inventory.cluster}: {len(outputs.inventory.nodes)} node(s), "
        f"{outputs.price_and_end()}. Check it: "
        + command("orchestrate", "preflight", "--inventory", name, "--wait", "20")
        + f"; remove it: {command('orchestrate', 'down')}"
    )
    return ExitCode.OK


def _how_to_remove() -> str:
    return (
        "What was built before stays and is billed until its lifetime ends: look with `pulumi "
        f"stack`, remove it with: {command('orchestrate', 'down')}"
    )


class _Results:
    """What is on the machines of a cluster that is up, before some of them go."""

    def __init__(
        self,
        pulumi: Pulumi,
        arguments: argparse.Namespace,
        env: Mapping[str, str],
        *,
        talk: Console,
    ) -> None:
        self._pulumi = pulumi
        self._arguments = arguments
        self._env = env
        self._talk = talk

    def look(self, going: Sequence[str]) -> AtStake | None:
        """Say which machines go, and what is to be collected first; None where nothing is."""
        if not going:
            return None
        self._talk.print(
            f"this ends {len(going)} machine(s), with all that is on them: {', '.join(going)}"
        )
        outputs = outputs_if_any(self._pulumi)
        if outputs is None or self._arguments.without_collect:
            return None
        stake = at_stake(
            outputs.inventory.cluster,
            outputs,
            self._env,
            folder=Path.cwd(),
            runs_dir=self._arguments.runs_dir,
            talk=self._talk,
        )
        self._talk.print(f"to collect first: {stake.names()}")
        return stake

    def save(self, going: Sequence[str], *, zone: str) -> bool:
        """Look, ask, and collect; False after a no. Raises when something would be lost."""
        stake, kept = self.look(going), "the cluster stays in its zone"
        if not going or self._arguments.without_collect:
            return True
        if stake is not None:
            stake.refuse_losses(kept=kept, force=_FORCE)
        question = f"End these machines and build in {zone}?"
        if not confirm(question, assume_yes=self._arguments.yes):
            return False
        if stake is not None:
            stake.bring_home(self._env, kept=kept, force=_FORCE)
        return True


def _make_key(pulumi: Pulumi, known: dict[str, Any], *, talk: Console) -> None:
    """The operator's key, whose public half the cluster program reads, unless there is one."""
    if known.get("operatorPublicKeyFile") or known.get("accessMode") == "oslogin":
        return
    path = operator_key_path(Path.cwd(), cluster=cluster_name(pulumi, known))
    public = path.with_name(f"{path.name}.pub")
    if not public.exists():
        write_whole(public, f"{make_operator_key(path)}\n")
        talk.print(f"made the key that opens the cluster: {path}")


def _refuse_if_changed(pulumi: Pulumi, before: StackState, *, kept: str) -> None:
    """Raises ConfigError when somebody else was at work while the operator was thinking."""
    if stack_state(pulumi) != before:
        raise ConfigError(
            f"the stack has changed meanwhile, so {kept}. Repeat: " + command("orchestrate", "up")
        )


def _build(
    pulumi: Pulumi,
    zones: Sequence[str],
    *,
    spot: bool,
    there: Sequence[str],
    results: _Results,
    talk: Console,
) -> None:
    """`pulumi up`; without capacity again in each further one of `zones`.

    All nodes are in one zone, so another one ends the machines that were `there`: that is asked.
    """
    left = list(zones[1:])
    while True:
        status, output = pulumi.follow("up", "--yes", "--skip-preview", say=talk.print)
        if status == 0:
            return
        stock_out = find_stock_out(output)
        if stock_out is None or not left:
            raise _failed(output, tried=zones[: len(zones) - len(left)], spot=spot)
        # One that the error says has capacity goes first; else the order of the config.
        zone = min(left, key=lambda each: (each not in stock_out.free, zones.index(each)))
        left.remove(zone)
        talk.print(f"{stock_out.describe()}\n--next-zone: the cluster goes to {zone} now")
        if not results.save(there, zone=zone):
            raise _failed(output, tried=zones[: len(zones) - len(left) - 1], spot=spot)
        there = []
        _move(pulumi, zone, zones)


def _move(pulumi: Pulumi, zone: str, zones: Sequence[str]) -> None:
    """Put `zone` first in the stack's config."""
    order = [zone, *(each for each in zones if each != zone)]
    for place, name in enumerate(order):
        pulumi.ask("config", "set", "--path", f"zones[{place}]", name)


def _failed(output: str, *, tried: Sequence[str], spot: bool) -> TileforgeError:
    error = explain(output, what="pulumi up")
    if not isinstance(error, CapacityError):
        return error
    if len(tried) > 1:
        error = _with_words(error, f"Zones of the config that were tried: {', '.join(tried)}")
    if spot:
        words = "Those were spot machines; for on-demand ones: pulumi config set spot false"
        error = _with_words(error, words)
    return error


def _take_back(
    error: TileforgeError,
    pulumi: Pulumi,
    known: dict[str, Any],
    arguments: argparse.Namespace,
    env: Mapping[str, str],
    *,
    talk: Console,
) -> TileforgeError:
    """Remove what a first `up` has built before it failed; the error to end with."""
    try:
        after = stack_state(pulumi)
        if not after.machines:
            words = f"No machine was built. Remove the rest with: {command('orchestrate', 'down')}"
            return _with_words(error, words)
        talk.print(f"error: {error}\nbuilt before: {', '.join(after.machines)}")
        if not confirm("Remove what was built?", assume_yes=arguments.yes):
            return _with_words(error, _how_to_remove())
        _refuse_if_changed(pulumi, after, kept="nothing was removed")
        cluster, folder = cluster_name(pulumi, known), Path.cwd()
        project = project_of(known.get("project"), cluster, env, folder=folder)
        google = Google(project, endpoints=Endpoints.from_env(env))
        destroy_and_look(pulumi, google, cluster, folder=folder, steps=2, talk=talk)
    except KeyboardInterrupt:
        talk.print(f"up was interrupted. {_how_to_remove()}")
        raise
    except TileforgeError as left:
        words = f"And what was built before is not all removed: {left}"
        return TeardownError(_joined(error, words))
    return _with_words(error, "What was built before is removed again")


def _with_words(error: TileforgeError, words: str) -> TileforgeError:
    again = TileforgeError(_joined(error, words))
    again.exit_code = error.exit_code
    return again


def _joined(error: TileforgeError, words: str) -> str:
    return f"{str(error).rstrip('.')}. {words}"


def _step(pulumi: Pulumi, word: str, *, say: Callable[[str], None]) -> None:
    status, output = pulumi.follow(word, say=say)
    if status != 0:
        raise explain(output, what=f"pulumi {word}")
