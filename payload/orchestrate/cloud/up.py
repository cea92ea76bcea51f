"""`up`: `pulumi preview`, the operator's yes, `pulumi up`; a failure is named for what it is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.errors import ConfigError, ExitCode, TeardownError, TileforgeError
from payload.hints import command
from payload.orchestrate.cloud.asks import confirm
from payload.orchestrate.cloud.building import Builder, remaining, with_words
from payload.orchestrate.cloud.endpoints import Endpoints
from payload.orchestrate.cloud.failures import StackBusyError
from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.machines import (
    StackState,
    changes_metadata,
    machines_that_go,
    stack_state,
)
from payload.orchestrate.cloud.need import need_of
from payload.orchestrate.cloud.operations import Operations
from payload.orchestrate.cloud.pulumi_cli import Pulumi
from payload.orchestrate.cloud.pulumi_events import Update
from payload.orchestrate.cloud.results_first import AtStake, at_stake
from payload.orchestrate.cloud.settings import cluster_name, settings, text_list
from payload.orchestrate.cloud.stack import outputs_if_any, read_outputs, remember, remember_plan
from payload.orchestrate.cloud.sweep import project_of
from payload.orchestrate.cloud.teardown import destroy_and_look
from payload.orchestrate.console import text_console
from payload.orchestrate.keys import make_operator_key, operator_key_path
from payload.results import write_whole

_FORCE = "up --without-collect"
_WORDS = {"kept": "nothing was built", "force": _FORCE}


def up(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Build the cluster, or bring it up to date."""
    talk, folder = text_console(stderr=True), Path.cwd()
    pulumi = Pulumi(env, folder=folder, stack=arguments.stack)
    known = settings(pulumi)
    zones = text_list(known.get("zones")) if arguments.next_zone else []
    if arguments.next_zone and len(zones) < 2:
        raise ConfigError(
            f"--next-zone: the config has {len(zones)} zone(s). Give more, in the order to try: "
            "pulumi config set --path 'zones[1]' ZONE"
        )
    cluster = cluster_name(pulumi, known)
    operations = Operations(
        pulumi=pulumi, cluster=cluster, folder=folder, talk=talk, assume_yes=arguments.yes
    )
    before = stack_state(pulumi)
    there = before.machines
    _make_key(known, cluster, there=there, talk=talk)
    preview = operations.preview()
    going = machines_that_go(preview) if there else []
    if there and changes_metadata(preview):
        talk.print(
            "machines that are up keep the operator's keys that they booted with; others reach "
            "only machines that are built from now on"
        )
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
    remember_plan(cluster, known, folder=folder)
    if stake is not None:
        stake.bring_home(env, **_WORDS)

    def google() -> Google:
        project = project_of(known.get("project"), cluster, env, folder=folder)
        return Google(project, endpoints=Endpoints.from_env(env))

    builder = Builder(
        operations=operations,
        google=google,
        zones=zones,
        spot=need_of(known).spot != "false",
        there=there,
        save=results.save,
    )
    try:
        update = builder.build()
    except StackBusyError:
        # What is there now is being built by somebody else.
        raise
    except TileforgeError as error:
        if there or arguments.keep_on_failure:
            raise with_words(error, _how_to_remove()) from None
        raise _take_back(error, operations, google) from None
    except KeyboardInterrupt:
        talk.print(f"up was interrupted{_what_is_there(pulumi, preview)}. {_how_to_remove()}")
        raise
    return _conclude(pulumi, builder, update, arguments, talk=talk)


def _conclude(
    pulumi: Pulumi,
    builder: Builder,
    update: Update,
    arguments: argparse.Namespace,
    *,
    talk: Console,
) -> int:
    """Remember the cluster, look at its firewall, and print what is next."""
    outputs = read_outputs(pulumi)
    remember(outputs, folder=Path.cwd())
    # Before the firewall: whatever is found there, the machines are billed.
    talk.print(
        f"cluster {outputs.inventory.cluster}: {len(outputs.inventory.nodes)} node(s), "
        f"{outputs.price_and_end()}; remove it: {command('orchestrate', 'down')}"
    )
    builder.settle_firewall(update)
    name = f"stack:{arguments.stack}" if arguments.stack else "stack"
    talk.print(
        "check its nodes: "
        + command("orchestrate", "preflight", "--inventory", name, "--wait", "20")
    )
    return ExitCode.OK


def _what_is_there(pulumi: Pulumi, preview: Update) -> str:
    try:
        return f": {remaining(stack_state(pulumi), preview)}"
    except TileforgeError:
        return ""


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

    def save(self, going: Sequence[str], kept: str, question: str) -> bool:
        """Look, ask, and collect; False after a no. Raises when something would be lost."""
        stake = self.look(going)
        if not going or self._arguments.without_collect:
            return True
        if stake is not None:
            stake.refuse_losses(kept=kept, force=_FORCE)
        if not confirm(question, assume_yes=self._arguments.yes):
            return False
        if stake is not None:
            stake.bring_home(self._env, kept=kept, force=_FORCE)
        return True


def _make_key(known: dict[str, Any], cluster: str, *, there: Sequence[str], talk: Console) -> None:
    """Make the operator's key, whose public half the cluster program reads, unless there is one.

    Raises ConfigError when machines are up: they know another key, and a new one ends them.
    """
    if known.get("operatorPublicKeyFile") or known.get("accessMode") == "oslogin":
        return
    path = operator_key_path(Path.cwd(), cluster=cluster)
    public = path.with_name(f"{path.name}.pub")
    if public.exists():
        return
    if there and not path.exists():
        raise ConfigError(
            f"{path}: the key that opens cluster {cluster} is not here, and its {len(there)} "
            "machine(s) know no other. Bring it from where the cluster was built; or remove the "
            f"cluster and build it from here: {command('orchestrate', 'down')}"
        )
    write_whole(public, f"{make_operator_key(path)}\n")
    talk.print(f"made the key that opens the cluster: {path}")


def _refuse_if_changed(pulumi: Pulumi, before: StackState, *, kept: str) -> None:
    """Raises ConfigError when somebody else was at work while the operator was thinking."""
    if stack_state(pulumi) != before:
        raise ConfigError(
            f"the stack has changed meanwhile, so {kept}. Repeat: " + command("orchestrate", "up")
        )


def _take_back(
    error: TileforgeError, operations: Operations, google: Callable[[], Google]
) -> TileforgeError:
    """Remove what a first `up` has built before it failed; the error to end with."""
    pulumi, talk = operations.pulumi, operations.talk
    try:
        after = stack_state(pulumi)
        if not after.machines:
            words = f"No machine was built. Remove the rest with: {command('orchestrate', 'down')}"
            return with_words(error, words)
        talk.print(f"error: {error}\nbuilt before: {', '.join(after.machines)}")
        if not confirm("Remove what was built?", assume_yes=operations.assume_yes):
            return with_words(error, _how_to_remove())
        _refuse_if_changed(pulumi, after, kept="nothing was removed")
        destroy_and_look(operations, google(), steps=2)
    except KeyboardInterrupt:
        talk.print(f"up was interrupted. {_how_to_remove()}")
        raise
    except TileforgeError as left:
        words = f"And what was built before is not all removed: {left}"
        return TeardownError(str(with_words(error, words)))
    return with_words(error, "What was built before is removed again")
