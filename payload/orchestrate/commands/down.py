"""`down`: collects missing results, destroys the cluster, and verifies that nothing remains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.core.errors import ConfigError, ExitCode, UsageError
from payload.core.suggested_commands import command
from payload.orchestrate.clouds.cluster_records import forget_bucket
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.orchestrate.clouds.gcp.filestore_confirmation import may_delete
from payload.orchestrate.clouds.gcp.leftovers import (
    find_leftovers,
    print_leftovers,
    report_leftovers,
)
from payload.orchestrate.clouds.gcp.machine_start import start_head
from payload.orchestrate.clouds.gcp.ownership import Ownership
from payload.orchestrate.clouds.gcp.project_choice import project_of
from payload.orchestrate.clouds.gcp.results_bucket_removal import Bucket, delete_bucket, find_bucket
from payload.orchestrate.clouds.pulumi.cli_errors import PulumiError
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.filestore import own_filestores
from payload.orchestrate.clouds.pulumi.operation_runner import Operations
from payload.orchestrate.clouds.pulumi.stack_config import cluster_name, settings
from payload.orchestrate.clouds.pulumi.stack_outputs import (
    StackOutputs,
    outputs_if_any,
    record_outputs,
    recorded_outputs,
)
from payload.orchestrate.clouds.pulumi.stack_state import StackState, ownership_of, stack_state
from payload.orchestrate.clouds.pulumi.teardown import destroy_and_verify
from payload.orchestrate.commands.cloud_options import DownOptions
from payload.orchestrate.commands.cluster_name_conflict import own_identity, require_own_state
from payload.orchestrate.commands.head_runs import BOOT_S
from payload.orchestrate.commands.results_at_stake import ResultsAtRisk, results_at_risk
from payload.orchestrate.terminal.console import confirm, confirm_by_name, text_console
from payload.stack.cluster_identity import recorded_cluster_identity

_MESSAGES = {"kept": "nothing was destroyed", "force": "down --without-collect"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The cluster to destroy, and the proof of ownership of its resources."""

    options: DownOptions
    env: Mapping[str, str]
    pulumi: Pulumi
    folder: Path
    talk: Console
    state: StackState
    cluster: str
    project: str
    outputs: StackOutputs | None
    """The stack's outputs; None if the cluster was never fully built."""
    projects: Sequence[tuple[Google, Ownership]]
    """The cluster's project, followed by other projects that the stack's state lists."""

    @property
    def google(self) -> Google:
        """Return the Google Cloud client for the cluster's project."""
        return self.projects[0][0]

    @property
    def own(self) -> Ownership:
        """Return the proof of ownership for resources in the cluster's project."""
        return self.projects[0][1]


def down(options: DownOptions, env: Mapping[str, str]) -> int:
    """Collect results, destroy the cluster, verify. Raises TeardownError if a resource remains."""
    target = _target(options, env)
    google, own, cluster, talk = target.google, target.own, target.cluster, target.talk
    # Check the credentials before anything is destroyed, because the last step needs them.
    google.check_credentials()
    for client, proof in target.projects if target.state.parts else ():
        require_own_state(client, cluster, proof, kept="nothing was destroyed", talk=talk)
    instances = (own_filestores(client, target.state, proof) for client, proof in target.projects)
    data = sorted(set(chain.from_iterable(instances)))
    # Confirm this first: the network cannot be destroyed while an instance exists. A stopped head
    # is started, and billed, only if the cluster will be destroyed.
    if not options.dry_run and not may_delete(
        data, named=options.delete_filestore, kept=_MESSAGES["kept"]
    ):
        talk.print("nothing was destroyed")
        return ExitCode.OK
    stake = None if options.without_collect else _stake(target)
    bucket = None
    if options.delete_bucket is not None:
        bucket = find_bucket(google, options.delete_bucket, cluster=cluster, own=own)
    _print_steps(stake, cluster, target.project, bucket, data, talk=talk)
    if options.dry_run:
        found = find_leftovers(
            google, cluster, folder=target.folder, keep_buckets=True, ownership=own
        )
        print_leftovers(found)
        talk.print("dry run: nothing was collected or destroyed")
        return ExitCode.OK
    if stake is not None:
        stake.refuse_losses(**_MESSAGES)
    confirmed = confirm(f"Destroy cluster {cluster}?", assume_yes=options.yes)
    if confirmed and bucket is not None:
        confirmed = confirm_by_name(f"Delete {bucket} permanently?", name=bucket.name)
    if not confirmed:
        talk.print("nothing was destroyed")
        return ExitCode.OK
    collected = [] if stake is None else stake.collect_missing(env, **_MESSAGES)
    talk.print(f"1/3 collect: {len(collected)} run(s) collected")
    _destroy(target, data, bucket)
    return ExitCode.OK


def _target(options: DownOptions, env: Mapping[str, str]) -> _Target:
    talk = text_console(stderr=True)
    folder = Path.cwd()
    pulumi = Pulumi(env, folder=folder, stack=options.stack)
    state = _state_if_readable(pulumi)
    cluster, project, outputs = _resolve_cluster(
        pulumi, options, env, state=state, folder=folder, talk=talk
    )
    if options.dry_run:
        identity, _ = recorded_cluster_identity(folder, cluster)
    else:
        identity = own_identity(folder, cluster, state_identities=state.identities)
    # The state can list resources outside the configured project.
    projects = [
        (
            Google(each, endpoints=Endpoints.from_env(env)),
            ownership_of(state, identity, project=each),
        )
        for each in dict.fromkeys((project, *state.projects))
    ]
    return _Target(
        options=options,
        env=env,
        pulumi=pulumi,
        folder=folder,
        talk=talk,
        state=state,
        cluster=cluster,
        project=project,
        outputs=outputs,
        projects=projects,
    )


def _stake(target: _Target) -> ResultsAtRisk:
    """Return the results that would be lost; if the head is stopped, start it first."""
    outputs, started = target.outputs, None
    if outputs is not None:
        started = start_head(
            target.google,
            outputs.inventory,
            target.own,
            dry_run=target.options.dry_run,
            assume_yes=target.options.yes,
            talk=target.talk,
        )
    if outputs is not None and started is not None:
        outputs = replace(outputs, inventory=started)
    stake = results_at_risk(
        target.cluster,
        outputs,
        target.env,
        folder=target.folder,
        runs_dir=target.options.runs_dir,
        talk=target.talk,
        retry_for_s=0.0 if started is None else BOOT_S,
    )
    if started is not None:
        stake.note_address(started.head)
    return stake


def _destroy(target: _Target, data: Sequence[str], bucket: Bucket | None) -> None:
    """Destroy the stack, verify every project, then delete the bucket."""
    cluster, folder, talk = target.cluster, target.folder, target.talk
    try:
        operations = Operations(
            pulumi=target.pulumi,
            cluster=cluster,
            folder=folder,
            talk=talk,
            assume_yes=target.options.yes,
        )
        destroy_and_verify(
            operations,
            target.google,
            state=target.state,
            steps=3,
            may_go=lambda each: each.name in data,
        )
        for client, proof in target.projects[1:]:
            left = find_leftovers(
                client, cluster, folder=folder, keep_buckets=True, ownership=proof
            )
            report_leftovers(left, talk=talk)
        if bucket is not None:
            delete_bucket(target.google, bucket)
            talk.print(f"gs://{bucket.name}: deleted")
            _forget(bucket.name, cluster, target.pulumi, folder=folder, talk=talk)
    except KeyboardInterrupt:
        scope = ("--cluster", cluster, "--project", target.project)
        listing = command("orchestrate", "sweep", *scope)
        talk.print(
            f"down was interrupted: remaining resources of {cluster} are billed until its lifetime "
            f"ends. Repeat: {command('orchestrate', 'down')}; or list them: {listing}"
        )
        raise


def _forget(bucket: str, cluster: str, pulumi: Pulumi, *, folder: Path, talk: Console) -> None:
    """Remove a deleted bucket from record and config, because other users can now use the bucket's
    name."""
    forget_bucket(folder, cluster, bucket)
    with suppress(PulumiError):
        if settings(pulumi).get("bucket") == bucket:
            pulumi.ask("config", "set", "bucket", "create")
            talk.print(
                "the stack's config now has `bucket create`: the next `up` makes a new bucket"
            )


def _state_if_readable(pulumi: Pulumi) -> StackState:
    """Return the stack's state, or an empty state if it is damaged.

    With an empty state, only the identity proves which resources belong to the cluster.
    """
    try:
        return stack_state(pulumi)
    except PulumiError as error:
        if error.trouble != "damaged state":
            raise
        return StackState(machines=(), parts=())


def _resolve_cluster(
    pulumi: Pulumi,
    options: DownOptions,
    env: Mapping[str, str],
    *,
    state: StackState,
    folder: Path,
    talk: Console,
) -> tuple[str, str, StackOutputs | None]:
    """Return the cluster, its project, and its outputs if it was ever built.

    If the state is damaged, the outputs come from this folder's record. Without a record, raises
    ConfigError if the options do not accept the loss of results.
    """
    try:
        outputs = outputs_if_any(pulumi)
    except PulumiError as error:
        if error.trouble != "damaged state":
            raise
        return _without_state(error, pulumi, options, env, folder=folder, talk=talk)
    if outputs is None:
        # The build failed before it finished, and this cluster must be destroyed.
        config = settings(pulumi)
        cluster = options.cluster or cluster_name(pulumi, config)
        given = options.project or next(iter(state.projects), None) or config.get("project")
        return cluster, project_of(given, cluster, env, folder=folder), None
    record_outputs(outputs, folder=folder, made_bucket=state.bucket)
    cluster = outputs.inventory.cluster
    if options.cluster not in (None, cluster):
        raise ConfigError(
            f"--cluster {options.cluster}: the stack's cluster is {cluster}. To destroy "
            f"{cluster}, leave --cluster out."
        )
    if options.project not in (None, outputs.project):
        raise ConfigError(
            f"--project {options.project}: the stack's project is {outputs.project}. To destroy "
            "the stack's cluster, leave --project out."
        )
    return cluster, outputs.project, outputs


def _without_state(
    error: PulumiError,
    pulumi: Pulumi,
    options: DownOptions,
    env: Mapping[str, str],
    *,
    folder: Path,
    talk: Console,
) -> tuple[str, str, StackOutputs | None]:
    talk.print(f"warning: {error}")
    config: dict[str, Any] = {}
    with suppress(PulumiError):
        config = settings(pulumi)
    try:
        cluster = options.cluster or cluster_name(pulumi, config)
    except PulumiError:
        raise UsageError("the cluster's name is unknown. Set the name with --cluster.") from None
    project = project_of(options.project or config.get("project"), cluster, env, folder=folder)
    outputs = recorded_outputs(folder, cluster, project=project)
    if outputs is None and not options.without_collect:
        raise ConfigError(
            f"the state is damaged, and this folder has no record of {cluster}. The cluster's "
            "head can have uncollected results, so nothing was destroyed. Repair the state as the "
            "warning describes; or destroy the results too: "
            + command(
                *("orchestrate", "down", "--without-collect"),
                *("--cluster", cluster, "--project", project),
            )
        )
    talk.print(
        f"resources of {cluster} in {project} are listed from Google Cloud, not from the stack's "
        "state"
    )
    return cluster, project, outputs


def _print_steps(
    stake: ResultsAtRisk | None,
    cluster: str,
    project: str,
    bucket: Bucket | None,
    data: Sequence[str],
    *,
    talk: Console,
) -> None:
    """Print what will be collected, destroyed and verified, before the confirmation."""
    last = "a results bucket, if there is one, stays" if bucket is None else f"then {bucket}"
    first = "nothing (--without-collect)" if stake is None else stake.names()
    also = "".join(f", Filestore {name} with all its data" for name in data)
    talk.print(f"to collect: {first}")
    talk.print(f"to destroy: every machine, disk and network{also}; {last}")
    talk.print(f"to verify: no resource of {cluster} remains in {project}")
