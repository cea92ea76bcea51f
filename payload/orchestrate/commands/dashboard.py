"""`dashboard`: show a run's metrics in the browser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from payload.core.errors import (
    ExitCode,
    PreflightError,
    UsageError,
)
from payload.core.printable_text import shown
from payload.core.suggested_commands import command
from payload.core.validation.names import RUN_ID
from payload.machines.inventory import ClusterInventory
from payload.monitor.local import (
    GRAFANA_PORT,
    PROMETHEUS_PORT,
    is_healthy,
    local_stack,
    run_page,
    stay,
)
from payload.monitor.tunnel import forwarded
from payload.orchestrate.commands.run_commands_options import DashboardOptions
from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.run_index import find_run
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import LATEST, RunPaths

if TYPE_CHECKING:
    from payload.orchestrate.ssh.cluster import Cluster


def dashboard(options: DashboardOptions, access: LocalAccess) -> int:
    """Show the dashboards until Ctrl-C; return the exit code."""
    show, say = text_console(stderr=False).print, text_console(stderr=True).print
    inventory, paths = _inventory_and_run(options, access.environment())
    run_id = paths.run_id if paths is not None else _run_id(options)
    try:
        if paths is not None and inventory.access.shares_folder:
            with local_stack(
                paths, python=access.python, env=access.code_environment(), say=say
            ) as pages:
                stay(pages, show=show, say=say, in_browser=options.open)
        else:
            # paramiko takes half a second to import.
            from payload.orchestrate.sites.ssh_run import update_head_address
            from payload.orchestrate.ssh.cluster import connect_to

            env = access.environment()
            news = str if paths is None else partial(update_head_address, paths, env)
            cluster = connect_to(inventory, ssh_key=options.ssh_key, env=env, news=news)
            with _cluster_pages(cluster, run_id) as pages:
                stay(pages, show=show, say=say, in_browser=options.open)
    except KeyboardInterrupt:
        say("ended")
    return ExitCode.OK


def _inventory_and_run(
    options: DashboardOptions, env: Mapping[str, str]
) -> tuple[ClusterInventory, RunPaths | None]:
    """Return the cluster, and the run if it is on this machine. Raises UsageError."""
    if options.inventory is not None:
        chosen = load_cluster(options.inventory, env=env).inventory
        if not chosen.access.shares_folder:
            return chosen, None
    paths = find_run(options.runs_dir, options.run)
    return ClusterInventory.load(paths.inventory), paths


def _run_id(options: DashboardOptions) -> str | None:
    """Return the ID of the run that a cluster's dashboard shows first. Raises UsageError.

    The run can be on the cluster without a local copy.
    """
    if options.run is None or options.run == LATEST:
        return None if options.run is None else find_run(options.runs_dir, LATEST).run_id
    if not RUN_ID.fullmatch(options.run):
        raise UsageError(
            f"{shown(options.run)} is not a run id. List the runs: {command('orchestrate', 'list')}"
        )
    return options.run


@contextmanager
def _cluster_pages(cluster: Cluster, run_id: str | None) -> Iterator[list[str]]:
    """Forward the ports of the head's Grafana and Prometheus; yield the URLs of the pages.

    `run_id` selects the page; the connection is closed at the end. Raises PreflightError if neither
    server runs.
    """
    with ExitStack() as stack:
        head = stack.enter_context(cluster).connect(cluster.inventory.head)
        ports = stack.enter_context(forwarded(head, (GRAFANA_PORT, PROMETHEUS_PORT)))
        grafana, prometheus = (f"http://127.0.0.1:{port}" for port in ports)
        pages = []
        if is_healthy(f"{grafana}/api/health"):
            pages.append(run_page(grafana, run_id))
        if is_healthy(f"{prometheus}/-/ready"):
            pages.append(f"{prometheus}/alerts")
        if not pages:
            raise PreflightError(
                f"{head.node.name} has neither Grafana nor Prometheus. Add them: pulumi config set "
                "monitoring prometheus, then tileforge up"
            )
        yield pages
