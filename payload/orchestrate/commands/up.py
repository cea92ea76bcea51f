"""`up`: runs a preview, prompts for confirmation, and runs `pulumi up`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.core.errors import ConfigError, ExitCode, TileforgeError
from payload.core.suggested_commands import command
from payload.orchestrate.clouds.cluster_records import record_plan
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.orchestrate.clouds.gcp.expiry_labels import renew_expiry_labels
from payload.orchestrate.clouds.gcp.filestore_confirmation import may_delete
from payload.orchestrate.clouds.gcp.machine_hand_additions import (
    KEPT_VARIABLE,
    Additions,
    added_lines,
    hand_added,
    kept_metadata,
)
from payload.orchestrate.clouds.gcp.machine_start import handle_stopped_machines
from payload.orchestrate.clouds.gcp.project_choice import project_of
from payload.orchestrate.clouds.gcp.removal_order import Resource
from payload.orchestrate.clouds.pulumi.building import Builder, replacing, with_note
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import Update
from payload.orchestrate.clouds.pulumi.failures import StackBusyError
from payload.orchestrate.clouds.pulumi.filestore import (
    filestores_that_go,
    has_filestore,
    refuse_another_region,
    zone_note,
)
from payload.orchestrate.clouds.pulumi.machine_status import places_in
from payload.orchestrate.clouds.pulumi.operation_runner import Operations
from payload.orchestrate.clouds.pulumi.operator_key import ensure_operator_key
from payload.orchestrate.clouds.pulumi.previews import (
    changes_metadata,
    creates_anything,
    machines_that_go,
    reasons,
)
from payload.orchestrate.clouds.pulumi.reused_bucket import use_kept_bucket
from payload.orchestrate.clouds.pulumi.rollback import (
    describe_machines,
    refuse_if_changed,
    removal_note,
    roll_back,
)
from payload.orchestrate.clouds.pulumi.stack_config import cluster_name, settings
from payload.orchestrate.clouds.pulumi.stack_outputs import read_outputs, record_outputs
from payload.orchestrate.clouds.pulumi.stack_state import (
    StackState,
    ownership_of,
    refuse_another_project,
    stack_state,
)
from payload.orchestrate.commands.cloud_options import UpOptions
from payload.orchestrate.commands.cluster_name_conflict import (
    conflicting_resources,
    own_identity,
    take_over,
)
from payload.orchestrate.commands.machine_results import MESSAGES, MachineResults
from payload.orchestrate.commands.results_at_stake import ResultsAtRisk
from payload.orchestrate.runs.at_risk import cluster_warning, refuse_spot_without_bucket
from payload.orchestrate.terminal.console import confirm, text_console
from payload.orchestrate.terminal.narrow import print_message
from payload.stack.billed_resources import BILLED_ON
from payload.stack.cloud_requirements import requirements_of, text_list
from payload.stack.cluster_files import cluster_path
from payload.stack.cluster_identity import resolve_cluster_identity


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """The stack as it was before the build."""

    options: UpOptions
    env: Mapping[str, str]
    config: dict[str, Any]
    """The stack's config."""
    operations: Operations
    before: StackState
    identity: str
    """The cluster's identity."""

    def google(self) -> Google:
        """Return the Google Cloud client for the project.

        Call it only when needed, because Google's libraries take a second to import.
        """
        cluster, folder = self.operations.cluster, self.operations.folder
        project = project_of(self.config.get("project"), cluster, self.env, folder=folder)
        return Google(project, endpoints=Endpoints.from_env(self.env))

    def of_other_cluster(self) -> Sequence[Resource]:
        """Return the resources of another cluster of this name that the user takes over."""
        # If this client's credentials differ from Pulumi's, it could not remove new resources.
        self.google().check_access()
        own = ownership_of(self.before, self.identity, project=self.google().project)
        return conflicting_resources(
            self.google(),
            self.operations.cluster,
            own,
            take_over=self.options.take_over,
            talk=self.operations.talk,
        )

    def may_delete(self, names: Iterable[str], *, kept: str) -> bool:
        """Return whether these Filestore instances may be deleted together with their data."""
        return may_delete(names, named=self.options.delete_filestore, kept=kept)

    def start_stopped(self) -> list[str]:
        """Start stopped machines; return Pulumi's arguments for replacing machines."""
        places = {}
        if self.before.parts:
            places = places_in(self.before, project=self.google().project)
        if not places:
            return []
        urns = handle_stopped_machines(
            self.google(),
            places,
            choice=self.options.stopped,
            dry_run=self.options.dry_run,
            assume_yes=self.options.yes,
            talk=self.operations.talk,
        )
        return replacing(urns)


def up(options: UpOptions, env: Mapping[str, str]) -> int:
    """Build or update the cluster."""
    stack = _resolved_stack(options, env)
    operations, talk = stack.operations, stack.operations.talk
    # Check this before a stopped machine is started: the machine can belong to another cluster now.
    others = stack.of_other_cluster() if stack.before.parts else ()
    added = _manual_additions(stack)
    use_kept_bucket(
        operations.pulumi,
        stack.config,
        operations.cluster,
        stack.before,
        stack.google,
        identity=stack.identity,
        folder=operations.folder,
        dry_run=options.dry_run,
        talk=talk,
    )
    replaces = stack.start_stopped()
    preview = operations.preview(*replaces)
    refuse_another_region(preview, requirements_of(stack.config).region)
    if not stack.before.parts and creates_anything(preview):
        others = stack.of_other_cluster()
    results = MachineResults(
        pulumi=operations.pulumi,
        runs_dir=options.runs_dir,
        without_collect=options.without_collect,
        assume_yes=options.yes,
        env=env,
        added=added,
        talk=talk,
    )
    stake = _print_changes(stack, preview, results)
    if options.dry_run:
        talk.print("dry run: nothing was built")
        return ExitCode.OK
    if not _confirmed(stack, preview, stake, others):
        talk.print("nothing was built")
        return ExitCode.OK
    record_plan(operations.cluster, stack.config, folder=operations.folder)
    if stake is not None:
        stake.collect_missing(env, **MESSAGES)
    builder = _builder(stack, results, replaces)
    update = _built(stack, builder, preview)
    return _finish(operations.pulumi, builder, update, options, talk=talk)


def _resolved_stack(options: UpOptions, env: Mapping[str, str]) -> _Stack:
    """Return the stack; create a missing key or identity. Raises ConfigError for a bad config."""
    talk, folder = text_console(stderr=True), Path.cwd()
    pulumi = Pulumi(env, folder=folder, stack=options.stack)
    config = settings(pulumi)
    zones = _zones(options, config)
    if options.next_zone and len(zones) < 2:
        raise ConfigError(
            f"--next-zone: the config has {len(zones)} zone(s), and needs 2 or more. Add a zone: "
            "pulumi config set --path 'zones[1]' ZONE"
        )
    may_lose = options.results_may_be_lost or options.dry_run
    refuse_spot_without_bucket(config, accepted=may_lose)
    cluster = cluster_name(pulumi, config)
    operations = Operations(
        pulumi=pulumi, cluster=cluster, folder=folder, talk=talk, assume_yes=options.yes
    )
    before = stack_state(pulumi)
    # Without a project the preview rejects the config.
    if config.get("project"):
        refuse_another_project(before, str(config["project"]))
    ensure_operator_key(config, cluster, there=before.machines, talk=talk)
    own_identity(folder, cluster, state_identities=before.identities)
    return _Stack(
        options=options,
        env=env,
        config=config,
        operations=operations,
        before=before,
        identity=resolve_cluster_identity(folder, cluster, told=before.identities),
    )


def _zones(options: UpOptions, config: Mapping[str, Any]) -> list[str]:
    return text_list(config.get("zones")) if options.next_zone else []


def _print_changes(stack: _Stack, preview: Update, results: MachineResults) -> ResultsAtRisk | None:
    """Print the changes to existing machines; return the results on machines to be deleted."""
    talk, machines = stack.operations.talk, stack.before.machines
    going = machines_that_go(preview) if machines else []
    for line in reasons(preview, going):
        talk.print(line)
    if machines and changes_metadata(preview):
        talk.print(
            "existing machines keep the operator keys from their boot; new keys apply only to "
            "new machines"
        )
    for line in added_lines(results.added, going):
        talk.print(line)
    stake = results.report(going)
    warning = cluster_warning(stack.config)
    if warning is not None:
        talk.print(f"warning: {warning}")
    return stake


def _confirmed(
    stack: _Stack, preview: Update, stake: ResultsAtRisk | None, others: Sequence[Resource]
) -> bool:
    """Return True after all confirmations; also take over another cluster's resources."""
    if stake is not None:
        stake.refuse_losses(**MESSAGES)
    data = filestores_that_go(preview)
    if not confirm("Build this?", assume_yes=stack.options.yes):
        return False
    if not stack.may_delete(data, kept="nothing was built"):
        return False
    refuse_if_changed(stack.operations.pulumi, stack.before, kept="nothing was built")
    return not others or take_over(
        stack.google(),
        others,
        cluster=stack.operations.cluster,
        may_delete=stack.may_delete,
        talk=stack.operations.talk,
    )


def _builder(stack: _Stack, results: MachineResults, replaces: Sequence[str]) -> Builder:
    cluster, folder = stack.operations.cluster, stack.operations.folder
    return Builder(
        operations=stack.operations,
        google=stack.google,
        identity=stack.identity,
        zones=_zones(stack.options, stack.config),
        spot=requirements_of(stack.config).spot,
        there=stack.before.machines,
        save=results.save,
        may_delete=stack.may_delete,
        full_zones=cluster_path(folder, cluster, "zones.json"),
        replaces=replaces,
    )


def _built(stack: _Stack, builder: Builder, preview: Update) -> Update:
    """Build the cluster; if a first build fails, remove everything."""
    operations, began_unix = stack.operations, time.time()
    try:
        return builder.build()
    except StackBusyError:
        # Another process is building the stack.
        raise
    except TileforgeError as error:
        if stack.before.machines or stack.options.keep_on_failure:
            last = with_note(error, removal_note(operations.pulumi))
        else:
            last = roll_back(
                error,
                operations,
                stack.google(),
                preview,
                since_unix=began_unix,
                has_data=has_filestore(stack.before),
            )
        builder.restore_zones()
        raise last from None
    except KeyboardInterrupt:
        left = describe_machines(operations, stack.google(), preview)
        operations.talk.print(f"up was interrupted: {left}. {removal_note(operations.pulumi)}")
        builder.restore_zones()
        raise


def _finish(
    pulumi: Pulumi,
    builder: Builder,
    update: Update,
    options: UpOptions,
    *,
    talk: Console,
) -> int:
    """Record the cluster, check its firewall, and print the next commands."""
    outputs = read_outputs(pulumi)
    record_outputs(outputs, folder=Path.cwd(), made_bucket=stack_state(pulumi).bucket)
    ends_unix = renew_expiry_labels(builder.google(), outputs.inventory.nodes, talk=talk)
    if ends_unix is not None:
        outputs = replace(outputs, expires=datetime.fromtimestamp(ends_unix, UTC).isoformat())
    # Print this before the firewall check, because the machines are billed in any case.
    talk.print(
        f"cluster {outputs.inventory.cluster}: {len(outputs.inventory.nodes)} node(s), "
        f"{outputs.price_and_end()}; remove it: {command('orchestrate', 'down')}"
    )
    print_message(
        talk,
        f"note: Google deletes only the machines at the end of their lifetime; {BILLED_ON}",
    )
    if note := zone_note(update, outputs.inventory.head.zone):
        print_message(talk, note)
    builder.settle_firewall(update)
    name = f"stack:{options.stack}" if options.stack else "stack"
    talk.print(
        "check its nodes: "
        + command("orchestrate", "preflight", "--inventory", name, "--wait", "20")
    )
    return ExitCode.OK


def _manual_additions(stack: _Stack) -> list[Additions]:
    """Return manual changes to the machines, and set the cluster program to keep them."""
    config, machines = stack.config, stack.before.machines
    # Without a project the preview rejects the config.
    if not machines or not config.get("project"):
        return []
    labels = {label.partition("=")[0] for label in text_list(config.get("labels"))}
    cluster = stack.operations.cluster
    added = hand_added(stack.google(), cluster, machines=machines, labels=labels)
    stack.operations.pulumi.tell_program(**{KEPT_VARIABLE: kept_metadata(added)})
    return added
