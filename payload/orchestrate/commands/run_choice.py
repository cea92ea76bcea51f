"""Finds the run that a command reads or changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from payload.core.errors import ConfigError, TileforgeError, UsageError
from payload.orchestrate.commands.run_commands_options import ClusterRunChoice
from payload.orchestrate.runs.mirror import Mirrored, read_mirrored
from payload.orchestrate.runs.run_index import find_run
from payload.orchestrate.runs.site import SiteRun, poll_alive
from payload.orchestrate.sites.registry import run_at_site
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import RunPaths

if TYPE_CHECKING:
    from payload.orchestrate.machine_profiles.local_profile import LocalAccess


def site_run(paths: RunPaths, access: LocalAccess) -> SiteRun:
    """Return the run of a local folder: a local run or a run at a site. Raises ConfigError."""
    env = access.environment()
    at_site = run_at_site(paths, env)
    if at_site is not None:
        return at_site
    mirrored = read_mirrored(paths)
    if mirrored is None:
        from payload.orchestrate.sites.local import LocalRun

        return LocalRun(paths, access=access)
    # paramiko takes half a second to import, and a local run does not need it.
    from payload.orchestrate.sites.ssh_run import run_of_copy

    return run_of_copy(paths, mirrored, env=env, talk=text_console(stderr=True))


def run_of(options: ClusterRunChoice, access: LocalAccess, *, verb: str) -> SiteRun:
    """Return the run of a local folder, or a run on the cluster of `--inventory`."""
    if options.inventory is None:
        return site_run(find_run(options.runs_dir, options.run), access)
    # `list` and `status` need no inventory, and these modules take 0.2 s to import.
    from payload.orchestrate.commands.inventory_site import site_of
    from payload.orchestrate.inventories.chosen import load_cluster

    chosen = load_cluster(options.inventory, env=access.environment())
    talk = text_console(stderr=True)
    site = site_of(chosen, access, talk=talk, argument=options.inventory, ssh_key=options.ssh_key)
    return site.find_run(options.run, runs_dir=options.runs_dir, verb=verb)


def local_run_error(paths: RunPaths) -> UsageError:
    """Return the error if a cluster command is used for a run on this machine."""
    return UsageError(
        f"run {paths.run_id} is on this machine: use status and logs -f. For a run on a cluster, "
        "choose the cluster with --inventory FILE."
    )


def is_alive_at_site(paths: RunPaths, env: Mapping[str, str]) -> bool | None:
    """Return whether a run's job is active; None if it has no job or the site does not respond."""
    try:
        at_site = run_at_site(paths, env)
        return None if at_site is None else poll_alive(at_site, set())
    except TileforgeError:
        return None


def readable_mirror(paths: RunPaths) -> Mirrored | None:
    """Return the record of a run's local copy, or None if the record is missing or unreadable."""
    try:
        return read_mirrored(paths)
    except ConfigError:
        return None  # an unreadable record does not prove that the run was collected
