"""`dashboard`: a run's metrics in the browser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from payload.core.errors import (
    ExitCode,
    PreflightError,
    UsageError,
)
from payload.core.printable_text import shown
from payload.core.validation.names import RUN_ID
from payload.machines.inventory import ClusterInventory
from payload.monitor.local import (
    GRAFANA_PORT,
    PROMETHEUS_PORT,
    answers,
    ended_by_sigterm,
    local_stack,
    run_page,
    stay,
)
from payload.monitor.tunnel import forwarded
from payload.orchestrate.access.local import LocalAccess
from payload.orchestrate.commands.run_choice import ClusterRunChoice
from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.runs.run_index import find_run
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import LATEST, RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions(ClusterRunChoice):
    """Options of `dashboard`."""

    open: bool


def dashboard(options: DashboardOptions, access: LocalAccess) -> int:
    """Show the dashboards until Ctrl-C; return the exit code."""
    show, say = text_console(stderr=False).print, text_console(stderr=True).print
    inventory, paths = _what(options, access.environment())
    run_id = paths.run_id if paths is not None else _run_id(options)
    try:
        with ended_by_sigterm():
            if paths is not None and inventory.access.shares_folder:
                with local_stack(
                    paths, python=access.python, env=access.code_environment(), say=say
                ) as pages:
                    stay(pages, show=show, say=say, in_browser=options.open)
            else:
                with _cluster_pages(
                    inventory, replace(options, run=run_id), access.environment(), copy=paths
                ) as pages:
                    stay(pages, show=show, say=say, in_browser=options.open)
    except KeyboardInterrupt:
        say("ended")
    return ExitCode.OK


def _what(
    options: DashboardOptions, env: Mapping[str, str]
) -> tuple[ClusterInventory, RunPaths | None]:
    """Return the cluster, and the run where it is one of this machine. Raises UsageError."""
    if options.inventory is not None:
        chosen = load_cluster(options.inventory, env=env).inventory
        if not chosen.access.shares_folder:
            return chosen, None
    paths = find_run(options.runs_dir, options.run)
    return ClusterInventory.load(paths.inventory), paths


def _run_id(options: DashboardOptions) -> str | None:
    """Return the id of the run that a cluster's page shows first. Raises UsageError.

    The cluster may have runs that nobody has followed from here.
    """
    if options.run is None or options.run == LATEST:
        return None if options.run is None else find_run(options.runs_dir, LATEST).run_id
    if not RUN_ID.fullmatch(options.run):
        raise UsageError(f"{shown(options.run)} is no run's id.")
    return options.run


@contextmanager
def _cluster_pages(
    inventory: ClusterInventory,
    options: DashboardOptions,
    env: Mapping[str, str],
    *,
    copy: RunPaths | None = None,
) -> Iterator[list[str]]:
    """Forward the head's Grafana and Prometheus to here. Raises PreflightError without them."""
    # paramiko takes half a second to import.
    from payload.orchestrate.sites.ssh_run import news_of_head
    from payload.orchestrate.ssh.cluster import Cluster, operator_key
    from payload.orchestrate.ssh.remote_calls import Login

    key = operator_key(inventory, given=options.ssh_key)
    login = Login(user=inventory.ssh_user, key=key)

    def news() -> str:
        return "" if copy is None else news_of_head(copy, env)

    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(inventory, login=login, env=env, news=news))
        head = cluster.connect(inventory.head)
        ports = stack.enter_context(forwarded(head, (GRAFANA_PORT, PROMETHEUS_PORT)))
        grafana, prometheus = (f"http://127.0.0.1:{port}" for port in ports)
        pages = []
        if answers(f"{grafana}/api/health"):
            pages.append(run_page(grafana, options.run))
        if answers(f"{prometheus}/-/ready"):
            pages.append(f"{prometheus}/alerts")
        if not pages:
            raise PreflightError(
                f"{inventory.head.name} has neither Grafana nor Prometheus. Build the cluster with "
                "them: pulumi config set monitoring prometheus, then tileforge up"
            )
        yield pages
