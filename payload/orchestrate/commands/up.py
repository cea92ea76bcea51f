"""`up`: preview, the operator's yes, and `pulumi up` until it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.core.errors import (
    ConfigError,
    ExitCode,
    TileforgeError,
)
from payload.core.suggested_commands import command
from payload.core.validation import read_bytes
from payload.orchestrate.clouds.cluster_records import remember_plan
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.orchestrate.clouds.gcp.filestore_deletion import may_delete
from payload.orchestrate.clouds.gcp.hand_additions import (
    KEPT_VARIABLE,
    Additions,
    added_lines,
    hand_added,
    kept_metadata,
)
from payload.orchestrate.clouds.gcp.machine_start import StoppedChoice, see_to_stopped
from payload.orchestrate.clouds.gcp.project_choice import project_of
from payload.orchestrate.clouds.gcp.resources import Resource
from payload.orchestrate.clouds.pulumi.building import Builder, replacing, with_words
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import Update
from payload.orchestrate.clouds.pulumi.failures import (
    StackBusyError,
)
from payload.orchestrate.clouds.pulumi.filestore import (
    filestores_that_go,
    has_filestore,
    refuse_another_region,
    zone_words,
)
from payload.orchestrate.clouds.pulumi.kept_bucket import use_kept_bucket
from payload.orchestrate.clouds.pulumi.machine_status import (
    places_in,
)
from payload.orchestrate.clouds.pulumi.operations import Operations
from payload.orchestrate.clouds.pulumi.previews import (
    changes_metadata,
    creates_anything,
    machines_that_go,
    reasons,
)
from payload.orchestrate.clouds.pulumi.rollback import (
    how_to_remove,
    refuse_if_changed,
    take_back,
    what_is_there,
)
from payload.orchestrate.clouds.pulumi.stack_config import cluster_name, settings
from payload.orchestrate.clouds.pulumi.stack_outputs import outputs_if_any, read_outputs, remember
from payload.orchestrate.clouds.pulumi.stack_state import (
    ownership_of,
    refuse_another_project,
    stack_state,
)
from payload.orchestrate.commands.cluster_name_conflict import of_this_name, own_identity, take_over
from payload.orchestrate.commands.results_at_stake import AtStake, at_stake
from payload.orchestrate.runs.at_risk import cluster_warning, refuse_spot_without_bucket
from payload.orchestrate.terminal.console import confirm, text_console
from payload.stack.cloud_need import need_of, text_list
from payload.stack.cluster_files import cluster_path
from payload.stack.cluster_identity import settle_cluster_identity
from payload.stack.operator_key import make_operator_key, operator_key_path, write_public_half

_FORCE = "up --without-collect"
_WORDS = {"kept": "nothing was built", "force": _FORCE}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Options of `up`."""

    stack: str | None
    runs_dir: Path
    next_zone: bool
    keep_on_failure: bool
    without_collect: bool
    take_over: str | None
    delete_filestore: list[str]
    """Names of Filestore instances that may be deleted with their data."""
    stopped: StoppedChoice | None
    """Treatment of stopped machines; None to ask."""
    results_may_be_lost: bool
    """Build spot machines without a bucket, too."""
    dry_run: bool
    yes: bool


def up(options: UpOptions, env: Mapping[str, str]) -> int:
    """Build the cluster, or bring it up to date."""
    talk, folder = text_console(stderr=True), Path.cwd()
    pulumi = Pulumi(env, folder=folder, stack=options.stack)
    known = settings(pulumi)
    zones = text_list(known.get("zones")) if options.next_zone else []
    if options.next_zone and len(zones) < 2:
        raise ConfigError(
            f"--next-zone: the config has {len(zones)} zone(s). Give more, in the order to try: "
            "pulumi config set --path 'zones[1]' ZONE"
        )
    may_lose = options.results_may_be_lost or options.dry_run
    refuse_spot_without_bucket(known, accepted=may_lose)
    cluster = cluster_name(pulumi, known)
    operations = Operations(
        pulumi=pulumi, cluster=cluster, folder=folder, talk=talk, assume_yes=options.yes
    )
    before = stack_state(pulumi)
    there = before.machines
    # Without a project the preview refuses the config.
    if known.get("project"):
        refuse_another_project(before, str(known["project"]))

    def google() -> Google:
        project = project_of(known.get("project"), cluster, env, folder=folder)
        return Google(project, endpoints=Endpoints.from_env(env))

    may_delete_data = partial(may_delete, named=options.delete_filestore)
    _make_key(known, cluster, there=there, talk=talk)
    own_identity(folder, cluster, told=before.identities)
    identity = settle_cluster_identity(folder, cluster, told=before.identities)

    def of_others() -> Sequence[Resource]:
        # With other credentials than Pulumi's, nothing that is built could be removed.
        google().check_access()
        own = ownership_of(before, identity, project=google().project)
        return of_this_name(google(), cluster, own, take_over=options.take_over, talk=talk)

    # Before a machine is started that the stack lists: it may be another cluster's by now.
    others = of_others() if before.parts else ()
    added = _see_additions(pulumi, known, cluster, google, there=there)
    use_kept_bucket(
        pulumi,
        known,
        cluster,
        before,
        google,
        identity=identity,
        folder=folder,
        dry_run=options.dry_run,
        talk=talk,
    )
    replaces: list[str] = []
    places = places_in(before, project=google().project) if before.parts else {}
    if places:
        replaces = replacing(
            see_to_stopped(
                google(),
                places,
                choice=options.stopped,
                dry_run=options.dry_run,
                assume_yes=options.yes,
                talk=talk,
            )
        )
    preview = operations.preview(*replaces)
    refuse_another_region(preview, need_of(known).region)
    if not before.parts and creates_anything(preview):
        others = of_others()
    going = machines_that_go(preview) if there else []
    for line in reasons(preview, going):
        talk.print(line)
    if there and changes_metadata(preview):
        talk.print(
            "machines that are up keep the operator's keys that they booted with; others reach "
            "only machines that are built from now on"
        )
    results = _Results(pulumi, options, env, added=added, talk=talk)
    for line in added_lines(added, going):
        talk.print(line)
    stake = results.look(going)
    warning = cluster_warning(known)
    if warning is not None:
        talk.print(f"warning: {warning}")
    if options.dry_run:
        talk.print("dry run: nothing was built")
        return ExitCode.OK
    if stake is not None:
        stake.refuse_losses(**_WORDS)
    if not confirm("Build this?", assume_yes=options.yes) or not may_delete_data(
        filestores_that_go(preview), kept="nothing was built"
    ):
        talk.print("nothing was built")
        return ExitCode.OK
    refuse_if_changed(pulumi, before, kept="nothing was built")
    if others and not take_over(
        google(), others, cluster=cluster, may_delete=may_delete_data, talk=talk
    ):
        talk.print("nothing was built")
        return ExitCode.OK
    remember_plan(cluster, known, folder=folder)
    if stake is not None:
        stake.bring_home(env, **_WORDS)
    builder = Builder(
        operations=operations,
        google=google,
        identity=identity,
        zones=zones,
        spot=need_of(known).spot,
        there=there,
        save=results.save,
        may_delete=may_delete_data,
        full_zones=cluster_path(folder, cluster, "zones.json"),
        replaces=replaces,
    )
    began_unix = time.time()
    try:
        update = builder.build()
    except StackBusyError:
        # What is there now is being built by somebody else.
        raise
    except TileforgeError as error:
        if there or options.keep_on_failure:
            last = with_words(error, how_to_remove(pulumi))
        else:
            last = take_back(
                error,
                operations,
                google(),
                preview,
                since_unix=began_unix,
                has_data=has_filestore(before),
            )
        builder.restore_zones()
        raise last from None
    except KeyboardInterrupt:
        what = what_is_there(operations, google(), preview)
        talk.print(f"up was interrupted: {what}. {how_to_remove(pulumi)}")
        builder.restore_zones()
        raise
    return _conclude(pulumi, builder, update, options, talk=talk)


def _conclude(
    pulumi: Pulumi,
    builder: Builder,
    update: Update,
    options: UpOptions,
    *,
    talk: Console,
) -> int:
    """Remember the cluster, look at its firewall, and print what is next."""
    outputs = read_outputs(pulumi)
    remember(outputs, folder=Path.cwd(), made_bucket=stack_state(pulumi).bucket)
    # Before the firewall: whatever is found there, the machines are billed.
    talk.print(
        f"cluster {outputs.inventory.cluster}: {len(outputs.inventory.nodes)} node(s), "
        f"{outputs.price_and_end()}; remove it: {command('orchestrate', 'down')}"
    )
    if words := zone_words(update, outputs.inventory.head.zone):
        talk.print(words)
    builder.settle_firewall(update)
    name = f"stack:{options.stack}" if options.stack else "stack"
    talk.print(
        "check its nodes: "
        + command("orchestrate", "preflight", "--inventory", name, "--wait", "20")
    )
    return ExitCode.OK


class _Results:
    """Results on the machines of a cluster that is up, before some of them are removed."""

    def __init__(
        self,
        pulumi: Pulumi,
        options: UpOptions,
        env: Mapping[str, str],
        *,
        added: Sequence[Additions],
        talk: Console,
    ) -> None:
        self._added = added
        self._pulumi = pulumi
        self._options = options
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
        if outputs is None or self._options.without_collect:
            return None
        stake = at_stake(
            outputs.inventory.cluster,
            outputs,
            self._env,
            folder=Path.cwd(),
            runs_dir=self._options.runs_dir,
            talk=self._talk,
        )
        self._talk.print(f"to collect first: {stake.names()}")
        return stake

    def save(self, going: Sequence[str], kept: str, question: str) -> bool:
        """Look, ask, and collect; False after a no. Raises when something would be lost."""
        for line in added_lines([each for each in self._added if each.machine in going], going):
            self._talk.print(line)
        stake = self.look(going)
        if not going or self._options.without_collect:
            return True
        if stake is not None:
            stake.refuse_losses(kept=kept, force=_FORCE)
        if not confirm(question, assume_yes=self._options.yes):
            return False
        if stake is not None:
            stake.bring_home(self._env, kept=kept, force=_FORCE)
        return True


def _see_additions(
    pulumi: Pulumi,
    known: Mapping[str, Any],
    cluster: str,
    google: Callable[[], Google],
    *,
    there: Sequence[str],
) -> list[Additions]:
    """Return what people have added to the machines, and tell the cluster program to leave it."""
    # Without a project the preview refuses the config.
    if not there or not known.get("project"):
        return []
    labels = {label.partition("=")[0] for label in text_list(known.get("labels"))}
    added = hand_added(google(), cluster, machines=there, labels=labels)
    pulumi.tell_program(**{KEPT_VARIABLE: kept_metadata(added)})
    return added


def _make_key(known: dict[str, Any], cluster: str, *, there: Sequence[str], talk: Console) -> None:
    """Make the operator's key, whose public half the cluster program reads, unless there is one.

    Raises ConfigError when machines are up: they know another key, and a new one ends them. So too
    for a public half alone, or of another key, as may come with the folder: it would log in.
    """
    if known.get("operatorPublicKeyFile") or known.get("accessMode") == "oslogin":
        return
    path = operator_key_path(Path.cwd(), cluster=cluster)
    public = path.with_name(f"{path.name}.pub")
    if public.exists():
        if path.exists():
            is_ours = read_bytes(public).split()[:2] == make_operator_key(path).encode().split()[:2]
        else:
            is_ours = bool(there)
        if is_ours:
            return
        raise ConfigError(
            f"{public}: its private half is not here, so somebody else may have it. Move it away "
            f"for a new key; or, if it is yours: pulumi config set operatorPublicKeyFile {public}"
        )
    if there and not path.exists():
        raise ConfigError(
            f"{path}: the key that opens cluster {cluster} is not here, and its {len(there)} "
            "machine(s) know no other. Bring it from where the cluster was built; or remove the "
            f"cluster and build it from here: {command('orchestrate', 'down')}"
        )
    write_public_half(path)
    talk.print(f"made the key that opens the cluster: {path}")
