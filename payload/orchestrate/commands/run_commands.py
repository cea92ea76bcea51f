"""Commands on runs: show them, follow, stop and collect one, and remove old ones from the disk."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from payload.config.store_address import StoreAddress
from payload.core.errors import (
    ConfigError,
    ExitCode,
    PreflightError,
    SshUnreachableError,
    TileforgeError,
    UsageError,
)
from payload.core.suggested_commands import command
from payload.core.validation import RUN_ID, refuse_links, shown
from payload.launch.ranks import load_ranks
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
from payload.orchestrate.commands.run import site_of
from payload.orchestrate.follow.follow import (
    EndOptions,
    StopWait,
    Tail,
    follow,
    follow_log,
    say_run_end,
)
from payload.orchestrate.follow.run_text import list_lines, ranks_lines, status_lines
from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.runs.mirror import Mirrored, mirror_file, read_mirrored
from payload.orchestrate.runs.removal import (
    finish_removals,
    is_own_run,
    needs,
    refuse_to_remove,
    remove_run,
)
from payload.orchestrate.runs.run_index import (
    all_runs,
    collect_from_store,
    find_run,
    is_copy,
    view_run,
)
from payload.orchestrate.runs.site import SiteRun, how_to_attach, looks_alive
from payload.orchestrate.sites.local import LocalRun
from payload.orchestrate.sites.registry import run_at_site
from payload.orchestrate.terminal.console import text_console
from payload.run_record.named_settings import unnamed
from payload.run_record.run_files import (
    LATEST,
    RunPaths,
    StopRequest,
    point_latest_at,
)
from payload.run_record.run_lock import FORCE_SIGNAL
from payload.run_record.write_report import write_report
from payload.storage.here import is_address, run_address, stored_at
from payload.storage.isolated_reader import watched_store


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """Options of `list`."""

    runs_dir: Path
    json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoice:
    """Which run a command is about; the options of `collect`."""

    run: str | None
    runs_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions(RunChoice):
    """Options of `status`."""

    json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsOptions(RunChoice):
    """Options of `logs`."""

    rank: int
    launcher: bool
    follow: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRunChoice(RunChoice):
    """Which run a command is about: by its folder here, or on the cluster of an inventory."""

    inventory: str | None
    ssh_key: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions(ClusterRunChoice):
    """Options of `attach`."""

    json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOptions(ClusterRunChoice):
    """Options of `stop`."""

    force: bool
    grace: float | None
    """Seconds to save a checkpoint; None for what `run` was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions(ClusterRunChoice):
    """Options of `dashboard`."""

    open: bool


def status(options: StatusOptions, access: LocalAccess) -> int:
    """Show one run and its ranks."""
    began_unix = time.time()
    paths = find_run(options.runs_dir, options.run)
    run = site_run(paths, access)
    with closing(run), run.watched() as look:
        alive = look()
    for line in _stopped(paths, access.environment(), since_unix=began_unix):
        text_console(stderr=True).print(line)
    view = view_run(paths, now_unix=time.time(), alive=alive if run.has_job else None)
    out = text_console(stderr=False)
    if options.json:
        out.print(json.dumps(asdict(view), indent=2))
        return ExitCode.OK
    lines = [*status_lines(view, width=out.width), "", *ranks_lines(view, width=out.width)]
    out.print("\n".join(lines))
    return ExitCode.OK


def _stopped(paths: RunPaths, env: Mapping[str, str], *, since_unix: float) -> list[str]:
    """Return which machines were stopped, of a copy that no node has brought up to date since then.

    A run that has ended and was collected needs none.
    """
    mirrored = _mirrored(paths)
    if mirrored is None or mirrored.collected is not None or mirrored.seen_unix >= since_unix:
        return []
    # Google's libraries take a second to import.
    from payload.orchestrate.cloud.machine_status import stopped_words

    with suppress(ConfigError):
        return stopped_words(ClusterInventory.load(paths.inventory), env)
    return []


def site_run(paths: RunPaths, access: LocalAccess) -> SiteRun:
    """Return the run of a folder here, wherever it lives. Raises ConfigError."""
    env = access.environment()
    at_site = run_at_site(paths, env)
    if at_site is not None:
        return at_site
    mirrored = read_mirrored(paths)
    if mirrored is None:
        return LocalRun(paths, access=access)
    # paramiko takes half a second to import, which a local run does not need.
    from payload.orchestrate.sites.ssh_run import run_of_copy

    return run_of_copy(paths, mirrored, env=env, talk=text_console(stderr=True))


def _run_of(options: ClusterRunChoice, access: LocalAccess, *, verb: str) -> SiteRun:
    """Return the run of a folder here, or one that the cluster of `--inventory` has."""
    if options.inventory is None:
        return site_run(find_run(options.runs_dir, options.run), access)
    chosen = load_cluster(options.inventory, env=access.environment())
    talk = text_console(stderr=True)
    site = site_of(chosen, access, talk=talk, argument=options.inventory, ssh_key=options.ssh_key)
    return site.find_run(options.run, runs_dir=options.runs_dir, verb=verb)


def attach(options: AttachOptions, access: LocalAccess) -> int:
    """Follow a run that is not of this machine to its end, whoever started it."""
    run = _run_of(options, access, verb="attach")
    if not (run.has_job or run.is_copied):
        raise _is_here(run.paths)
    end = EndOptions(json=options.json, inventory=options.inventory)
    with closing(run):
        return follow(run, options=end, talk=text_console(stderr=True))


def _is_here(paths: RunPaths) -> UsageError:
    return UsageError(
        f"run {paths.run_id} is on this machine: look with status and logs -f. For one on a "
        "cluster, name it with --inventory FILE."
    )


def collect(options: RunChoice, access: LocalAccess) -> int:
    """Bring logs, metrics, summary and the newest checkpoint of a run here.

    They come from the run's store where its address is given, and where no machine answers.
    """
    talk = text_console(stderr=True)
    if options.run is not None and is_address(options.run):
        address = run_address(options.run)
        paths = RunPaths(options.runs_dir / address.last())
        return _collect_stored(address, paths, env=access.code_environment(), talk=talk)
    run = site_run(find_run(options.runs_dir, options.run), access)
    if not run.is_copied:
        raise _is_here(run.paths)
    try:
        with closing(run):
            home = run.bring_home()
    except SshUnreachableError as error:
        kept = stored_at(run.paths)
        if kept is None:
            raise
        if unnamed(run.paths, {"storage.results": str(kept.parent())}):
            # The word of a node, or of whoever made the folder.
            raise SshUnreachableError(
                f"{error} The run's settings name {kept}, which nobody has named for it on this "
                f"machine. If it is right: {command('orchestrate', 'collect', str(kept))}"
            ) from None
        talk.print(f"warning: {error} What is in {kept} comes instead.")
        return _collect_stored(kept, run.paths, env=access.code_environment(), talk=talk)
    if home.checkpoint is not None:
        with suppress(OSError):  # the link is a convenience
            point_latest_at(run.paths)
    talk.print(f"checkpoint: {home.checkpoint or 'none yet'}")
    talk.print(f"everything in {run.paths.root}" + ("; the run goes on" if home.alive else ""))
    return ExitCode.OK


def _collect_stored(
    address: StoreAddress, paths: RunPaths, *, env: Mapping[str, str], talk: Console
) -> int:
    with watched_store(address, env=env, say=talk.print) as store:
        found = collect_from_store(store, paths, say=talk.print)
    problem = write_report(paths)
    if problem is not None:
        talk.print(f"note: no report was written: {problem}")
    with suppress(OSError):  # the link is a convenience
        point_latest_at(paths)
    talk.print(f"checkpoint: {found or 'none yet'}")
    talk.print(f"everything in {paths.root}; it comes from {address}")
    return ExitCode.OK


def list_runs(options: ListOptions, access: LocalAccess) -> int:
    """Show all runs, the newest first."""
    views = []
    for paths in all_runs(options.runs_dir):
        try:
            alive = _alive_at_site(paths, access)
            views.append(view_run(paths, now_unix=time.time(), alive=alive))
        except ConfigError as error:
            text_console(stderr=True).print(f"note: run {paths.run_id} left out: {error}")
    out = text_console(stderr=False)
    if options.json:
        out.print(json.dumps([asdict(view) for view in views], indent=2))
    elif views:
        out.print("\n".join(list_lines(views, width=out.width)))
    else:
        text_console(stderr=True).print(f"no run in {options.runs_dir}")
    return ExitCode.OK


def _alive_at_site(paths: RunPaths, access: LocalAccess) -> bool | None:
    """Return whether a run's job goes on; None where it has none, or its site does not answer."""
    try:
        at_site = run_at_site(paths, access.environment())
        return None if at_site is None else looks_alive(at_site, set())
    except TileforgeError:
        return None


def logs(options: LogsOptions, access: LocalAccess) -> int:
    """Print a rank's log or the launcher's."""
    paths = find_run(options.runs_dir, options.run)
    rank = 0 if options.launcher else options.rank
    node = _node_of(paths, rank)
    path = paths.launcher_log if options.launcher else paths.rank_log(rank)
    try:
        refuse_links(path, below=paths.root)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}.") from None
    out, run = text_console(stderr=False), site_run(paths, access)
    with closing(run), run.watched(node) as alive:
        if not alive() and not path.exists():
            raise UsageError(f"{path} does not exist: the run ended before it wrote one.")
        follow_log(
            Tail(path),
            show=out.print,
            alive=lambda: options.follow and not out.is_closed and alive(),
        )
    return ExitCode.OK


def _node_of(paths: RunPaths, rank: int) -> str | None:
    """Return the name of a rank's node; None where the rank file cannot be read."""
    try:
        ranks = load_ranks(paths.ranks)
    except ConfigError:
        return None
    if not 0 <= rank < len(ranks):
        raise UsageError(f"--rank {rank}: run {paths.run_id} has ranks 0 to {len(ranks) - 1}.")
    return ranks[rank].node


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
    from payload.orchestrate.preflight.checks import operator_key
    from payload.orchestrate.sites.ssh_run import news_of_head
    from payload.orchestrate.ssh.connection import Cluster
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


def stop(options: StopOptions, access: LocalAccess) -> int:
    """Stop a run with a checkpoint or at once, and see that no process of it is left."""
    talk = text_console(stderr=True)
    run = _run_of(options, access, verb="stop")
    with closing(run):
        return _stop(run, options, talk=talk)


def _stop(run: SiteRun, options: StopOptions, *, talk: Console) -> int:
    number = FORCE_SIGNAL if options.force else signal.SIGTERM
    request = StopRequest(grace_s=options.grace)
    run_id = run.paths.run_id
    if run.signal(number, request):
        how = "stopping at once" if options.force else "saving and stopping"
        talk.print(f"run {run_id}: {how}")
        wait = StopWait(run.paths, request)
        while run.look().alive:
            if wait.is_over() or (options.force and wait.waited_s() > run.force_s):
                run.overdue(wait.waited_s(), force=options.force, talk=talk)
            time.sleep(run.every_s)
    else:
        talk.print(f"run {run_id} is not running{run.ended_as()}")
        if not run.is_copied:
            return ExitCode.OK
    home = run.bring_home(at_once=options.force)
    if home.alive:
        talk.print(f"it has ended and was started again; {how_to_attach(run.paths)}")
        return ExitCode.OK
    line = run.result_line()
    if line is not None:
        talk.print(line)
    else:
        say_run_end(run, options=EndOptions(inventory=options.inventory), talk=talk)
    if home.left is not None:
        raise home.left
    return ExitCode.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveOptions:
    """Options of `remove`."""

    runs: Sequence[str]
    keep: int | None
    """Remove all but so many of the newest, in place of `runs`."""
    dry_run: bool
    force: bool
    """Also runs that were not collected, and those with weights that another's adapter needs."""
    runs_dir: Path


def remove(options: RemoveOptions, access: LocalAccess) -> int:
    """Remove the named runs, or all but the newest; never one that is running."""
    runs_dir = options.runs_dir
    talk, out = text_console(stderr=True), text_console(stderr=False)
    if bool(options.runs) == (options.keep is not None):
        raise UsageError("name the runs to remove, or say how many to keep with --keep N.")
    if options.keep is not None and options.keep < 0:
        raise UsageError(f"--keep {options.keep}: must be 0 or more.")
    refused: TileforgeError | None = None
    gone: set[Path] = set()
    for paths in _chosen(runs_dir, options.runs, keep=options.keep):
        size = _size_bytes(paths.root) / 1e9
        try:
            if _alive_at_site(paths, access):
                raise UsageError(f"run {paths.run_id} has a job that has not ended. Stop it first.")
            mirrored = _mirrored(paths)
            refuse_to_remove(
                paths,
                [each for each in all_runs(runs_dir) if each.root not in gone],
                is_alive=mirrored is not None and mirrored.alive,
                may_lose=_may_lose(paths, mirrored),
                is_forced=options.force,
            )
            if not options.dry_run:
                remove_run(paths)
        except TileforgeError as error:
            refused = error
            talk.print(f"kept: {error}")
            continue
        gone.add(paths.root)
        verb = "would remove" if options.dry_run else "removed"
        out.print(f"{verb} {paths.run_id} ({size:,.2f} GB)")
    if not options.dry_run:
        finish_removals(runs_dir)
        _repair_latest(runs_dir)
    # What --keep passes over is no failure: it was not asked for by name.
    return refused.exit_code if refused is not None and options.runs else ExitCode.OK


def _chosen(runs_dir: Path, names: Sequence[str], *, keep: int | None) -> list[RunPaths]:
    """Return the runs that the command line means, each once. Raises UsageError.

    What only looks like a run does not count among those that are kept. A run comes after the
    adapters on its weights, as it can be removed only then.
    """
    if keep is not None:
        found = [paths for paths in all_runs(runs_dir) if is_own_run(paths)][keep:]
    else:
        named = {paths.root: paths for paths in (find_run(runs_dir, name) for name in names)}
        found = list(named.values())
    return sorted(found, key=lambda paths: any(needs(other, paths) for other in found))


def _mirrored(paths: RunPaths) -> Mirrored | None:
    try:
        return read_mirrored(paths)
    except ConfigError:
        return None  # what cannot be read does not say that the run was collected


def _may_lose(paths: RunPaths, mirrored: Mirrored | None) -> bool:
    """Tell whether the run is on a cluster and was not collected."""
    was_collected = mirrored is not None and mirrored.collected is not None
    return not was_collected and (mirror_file(paths).exists() or is_copy(paths))


def _repair_latest(runs_dir: Path) -> None:
    """Let `latest` lead to the newest run that has a checkpoint, where its own is gone."""
    link = runs_dir / LATEST
    if not link.is_symlink() or link.exists():
        return
    link.unlink()
    trained = [paths for paths in all_runs(runs_dir) if paths.newest_checkpoint() is not None]
    if trained:
        point_latest_at(trained[0])


def _size_bytes(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())
