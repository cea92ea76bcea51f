"""`down`: bring home what is missing, `pulumi destroy`, and look that nothing is left."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from payload.errors import ConfigError, ExitCode
from payload.hints import command
from payload.orchestrate.cloud.asks import confirm, confirm_by_name
from payload.orchestrate.cloud.endpoints import Endpoints
from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.operations import Operations
from payload.orchestrate.cloud.pulumi_cli import Pulumi
from payload.orchestrate.cloud.results_first import AtStake, at_stake
from payload.orchestrate.cloud.settings import cluster_name, settings
from payload.orchestrate.cloud.stack import StackOutputs, outputs_if_any, remember
from payload.orchestrate.cloud.sweep import look, project_of
from payload.orchestrate.cloud.teardown import Bucket, delete_bucket, destroy_and_look, find_bucket
from payload.orchestrate.console import text_console

_WORDS = {"kept": "nothing was destroyed", "force": "down --without-collect"}


def down(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The three steps; each one's result is said. Raises TeardownError when something is left."""
    talk = text_console(stderr=True)
    folder = Path.cwd()
    pulumi = Pulumi(env, folder=folder, stack=arguments.stack)
    cluster, project, outputs = _which(pulumi, arguments, env, folder=folder)
    google = Google(project, endpoints=Endpoints.from_env(env))
    # Before anything is destroyed: without these the last step could not look.
    google.check_credentials()
    stake = None
    if not arguments.without_collect:
        stake = at_stake(
            cluster, outputs, env, folder=folder, runs_dir=arguments.runs_dir, talk=talk
        )
    bucket = None
    if arguments.delete_bucket is not None:
        bucket = find_bucket(google, arguments.delete_bucket, cluster=cluster)
    _say_steps(stake, cluster, project, bucket, talk=talk)
    if arguments.dry_run:
        found = look(google, cluster, folder=folder, keep_buckets=True)
        text_console(stderr=False).print(found.table())
        talk.print("dry run: nothing was collected or destroyed")
        return ExitCode.OK
    if stake is not None:
        stake.refuse_losses(**_WORDS)
    if not confirm(f"Destroy cluster {cluster}?", assume_yes=arguments.yes):
        talk.print("nothing was destroyed")
        return ExitCode.OK
    if bucket is not None and not confirm_by_name(f"Delete {bucket} for good?", name=bucket.name):
        talk.print("nothing was destroyed")
        return ExitCode.OK
    brought = [] if stake is None else stake.bring_home(env, **_WORDS)
    talk.print(f"1/3 collect: {len(brought)} run(s) brought home")
    try:
        operations = Operations(
            pulumi=pulumi, cluster=cluster, folder=folder, talk=talk, assume_yes=arguments.yes
        )
        destroy_and_look(operations, google, steps=3)
        if bucket is not None:
            delete_bucket(google, bucket)
            talk.print(f"gs://{bucket.name}: deleted")
    except KeyboardInterrupt:
        talk.print(
            f"down was interrupted: what is left of {cluster} is billed until its lifetime ends, "
            "and it was not looked what that is. Go on with: "
            f"{command('orchestrate', 'down')}; "
            f"look with: sweep --cluster {cluster} --project {project}"
        )
        raise
    return ExitCode.OK


def _which(
    pulumi: Pulumi, arguments: argparse.Namespace, env: Mapping[str, str], *, folder: Path
) -> tuple[str, str, StackOutputs | None]:
    """The cluster, its project, and its outputs if it ever came up."""
    outputs = outputs_if_any(pulumi)
    if outputs is None:
        # It failed half-way, and is the one that must go.
        known = settings(pulumi)
        cluster = arguments.cluster or cluster_name(pulumi, known)
        given = arguments.project or known.get("project")
        return cluster, project_of(given, cluster, env, folder=folder), None
    remember(outputs, folder=folder)
    cluster = outputs.inventory.cluster
    if arguments.cluster not in (None, cluster):
        raise ConfigError(f"--cluster {arguments.cluster}: the stack's cluster is {cluster}.")
    return cluster, arguments.project or outputs.project, outputs


def _say_steps(
    stake: AtStake | None, cluster: str, project: str, bucket: Bucket | None, *, talk: Console
) -> None:
    last = "a results bucket stays" if bucket is None else f"then {bucket}"
    first = "left out (--without-collect)" if stake is None else stake.names()
    talk.print(f"1/3 collect: {first}")
    talk.print(f"2/3 pulumi destroy: every machine, disk and network; {last}")
    talk.print(f"3/3 sweep: look for what is left of {cluster} in {project}")
