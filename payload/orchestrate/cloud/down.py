"""`down`: bring home what is missing, `pulumi destroy`, and look that nothing is left."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from payload.errors import ConfigError, ExitCode, TeardownError, TileforgeError
from payload.inventory import ClusterInventory
from payload.orchestrate.cloud.endpoints import Endpoints
from payload.orchestrate.cloud.failures import explain
from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.pulumi_cli import Pulumi, PulumiError
from payload.orchestrate.cloud.settings import cluster_name, settings
from payload.orchestrate.cloud.stack import read_outputs, remember
from payload.orchestrate.cloud.sweep import conclude, confirm, look, project_of
from payload.orchestrate.mirror import read_mirrored
from payload.orchestrate.report import text_console
from payload.orchestrate.runs import all_runs
from payload.results import RunPaths, Summary, checkpoint_step, read_json


def down(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The three steps; each one's result is said. Raises TeardownError when something is left."""
    talk = text_console(stderr=True)
    folder = Path.cwd()
    pulumi = Pulumi(env, folder=folder, stack=arguments.stack)
    cluster, project = _which(pulumi, arguments, env, folder=folder)
    runs = [] if arguments.without_collect else _uncollected(arguments.runs_dir, cluster)
    _say_steps(runs, cluster, project, arguments=arguments, talk=talk)
    google = Google(project, endpoints=Endpoints.from_env(env))
    if arguments.dry_run:
        found = look(google, cluster, folder=folder, keep_buckets=True)
        text_console(stderr=False).print(found.table())
        talk.print("dry run: nothing was collected or destroyed")
        return ExitCode.OK
    # Before anything is destroyed: without these the last step could not look.
    google.check_credentials()
    if not confirm(f"Destroy cluster {cluster}?", assume_yes=arguments.yes):
        talk.print("nothing was destroyed")
        return ExitCode.OK
    for paths in runs:
        _collect(paths, env, talk=talk)
    talk.print(f"1/3 collect: {len(runs)} run(s) brought home")
    # A results bucket is protected: without the flag nothing at all would be destroyed.
    words = ("destroy", "--yes", "--skip-preview", "--exclude-protected")
    status, output = pulumi.follow(*words, say=talk.print)
    trouble = explain(output, what="pulumi destroy") if status else None
    talk.print("2/3 destroy: " + (f"FAILED: {trouble}" if trouble else "done"))
    return _sweep(google, cluster, trouble, folder=folder, talk=talk)


def _which(
    pulumi: Pulumi, arguments: argparse.Namespace, env: Mapping[str, str], *, folder: Path
) -> tuple[str, str]:
    """The cluster and its project."""
    try:
        outputs = read_outputs(pulumi)
    except PulumiError as error:
        # A stack that failed half-way has no outputs, and is the one that must go.
        if error.trouble != "no stack" or "has no output" not in str(error):
            raise
        known = settings(pulumi)
        cluster = arguments.cluster or cluster_name(pulumi, known)
        given = arguments.project or known.get("project")
        return cluster, project_of(given, cluster, env, folder=folder)
    remember(outputs, folder=folder)
    cluster = outputs.inventory.cluster
    if arguments.cluster not in (None, cluster):
        raise ConfigError(f"--cluster {arguments.cluster}: the stack's cluster is {cluster}.")
    return cluster, arguments.project or outputs.project


def _say_steps(
    runs: list[RunPaths],
    cluster: str,
    project: str,
    *,
    arguments: argparse.Namespace,
    talk: Console,
) -> None:
    names = ", ".join(paths.run_id for paths in runs) or "nothing is missing here"
    first = "left out (--without-collect)" if arguments.without_collect else names
    talk.print(f"1/3 collect: {first}")
    talk.print("2/3 pulumi destroy: every machine, disk and network; the results bucket stays")
    talk.print(f"3/3 sweep: look for what is left of {cluster} in {project}")


def _uncollected(runs_dir: Path, cluster: str) -> list[RunPaths]:
    """Runs of the cluster whose copy here lacks something, or that may still be going on."""
    found = []
    for paths in all_runs(runs_dir):
        mirrored = read_mirrored(paths)
        if mirrored is None or not paths.inventory.exists():
            continue
        if ClusterInventory.load(paths.inventory).cluster != cluster:
            continue
        if mirrored.alive or not _is_whole(paths):
            found.append(paths)
    return found


def _is_whole(paths: RunPaths) -> bool:
    """Whether the run has ended and its last checkpoint is here."""
    summary, checkpoint = read_json(Summary, paths.summary), paths.newest_checkpoint()
    if summary is None or checkpoint is None or summary.status == "running":
        return False
    return checkpoint_step(checkpoint) >= summary.steps


def _collect(paths: RunPaths, env: Mapping[str, str], *, talk: Console) -> None:
    """Bring a run home. Raises when it cannot be, or goes on: nothing is destroyed then."""
    # paramiko takes half a second to import.
    from payload.orchestrate.remote_commands import collect

    try:
        collect(argparse.Namespace(runs_dir=paths.root.parent, run=paths.run_id), env)
    except TileforgeError as error:
        again = TileforgeError(
            f"run {paths.run_id} is not brought home, so nothing was destroyed: {error} To destroy "
            "without its results: down --without-collect"
        )
        again.exit_code = error.exit_code
        raise again from None
    mirrored = read_mirrored(paths)
    if mirrored is not None and mirrored.alive:
        raise ConfigError(
            f"run {paths.run_id} is going on, so nothing was destroyed. Stop it first: python -m "
            f"payload.orchestrate stop {paths.run_id} (or lose its end: down --without-collect)"
        )


def _sweep(
    google: Google,
    cluster: str,
    trouble: TileforgeError | None,
    *,
    folder: Path,
    talk: Console,
) -> int:
    found = look(google, cluster, folder=folder, keep_buckets=True)
    if found.left:
        text_console(stderr=False).print(found.table())
    try:
        conclude(found, talk=talk)
    except TeardownError as error:
        talk.print("3/3 sweep: not clean")
        raise TeardownError(f"{error}{f' ({trouble})' if trouble else ''}") from None
    talk.print("3/3 sweep: clean")
    if trouble is not None:
        raise TeardownError(
            f"nothing of the cluster was found, but {trouble}. See `pulumi stack`, then: pulumi "
            "refresh && pulumi destroy"
        )
    return ExitCode.OK
