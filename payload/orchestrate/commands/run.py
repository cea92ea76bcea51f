"""`plan` and `run`, from parsed arguments to an exit code."""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rich.console import Console

from payload.batch_size import as_recorded, left_open
from payload.checkpoint_files import require_room
from payload.engines import require_packages_here
from payload.errors import INTERRUPTED, ConfigError, DataError, ExitCode, TileforgeError
from payload.hints import run_command
from payload.launch.plan import auto_batch_size
from payload.orchestrate.planning import PlannedRun, plan_run, require_known_sizes, settle_initial
from payload.orchestrate.run.console import text_console
from payload.orchestrate.run.follow import Tail, follow, follow_run, how_to_attach, say_end
from payload.orchestrate.run.report import Estimate, estimate, log_tail, print_plan, strategy_table
from payload.orchestrate.run.store import (
    all_runs,
    create_run,
    find_run,
    is_copy,
    room_for,
    running_here,
)
from payload.orchestrate.sites.choose import (
    Chosen,
    Order,
    Site,
    SiteRun,
    check_data,
    find_site,
    load_cluster,
    require_one_machine,
    run_at_site,
)
from payload.orchestrate.sites.local import LocalAccess
from payload.results import RunPaths, RunState, Summary, last_record, new_run_id, write_whole
from payload.run_config import RunConfig, load_run_config, parse_run_config
from payload.run_lock import is_supervised, starting
from payload.run_repair import config_to_resume, known_summary, make_room
from payload.tracking import missing_notes
from payload.untrusted import printable
from payload.write_report import add_samples

_START_TIMEOUT_S = 30.0


def plan(arguments: argparse.Namespace, access: LocalAccess) -> int:
    """Print what `run` would do."""
    talk, out = text_console(stderr=True), text_console(stderr=False)
    chosen, access = _chosen(arguments, access)
    talk.print(chosen.headline())
    config = config_of(arguments)
    try:
        vocab_size: int | None = _check_data(config)
    except DataError as error:
        vocab_size = None
        talk.print(f"note: a run would stop here: {error}")
    is_local = chosen.inventory.access.shares_folder
    try:
        config = _settle(config, vocab_size=vocab_size, is_local=is_local, talk=talk)
    except ConfigError as error:
        require_known_sizes(config)
        talk.print(f"note: a run would stop here: {error}")
    run_id = arguments.run_id or _fresh_id(config)
    if not is_local:
        # paramiko takes half a second to import, which a local run does not need.
        from payload.orchestrate.sites.cluster import plan_elsewhere

        planned = plan_elsewhere(
            run_id, config, chosen, vocab_size=vocab_size, root=Path.cwd(), now_unix=time.time()
        )
    else:
        require_one_machine(chosen)
        paths = RunPaths(arguments.runs_dir / run_id)
        with access.reserve_port() as holder:
            port = _port(holder)
            planned = _plan(paths, config, chosen, access, vocab_size=vocab_size, port=port)
        try:
            _require_room(planned)
        except ConfigError as error:
            talk.print(f"note: a run would stop here: {error}")
    _say_notes(planned, talk)
    data, earlier = Path(config.data.dir), all_runs(arguments.runs_dir)
    estimated = estimate(planned, data=data, earlier=earlier, is_local=is_local)
    if arguments.strategies:
        out.print(_strategies_json(planned) if arguments.json else strategy_table(planned))
    elif arguments.json:
        out.print(_plan_json(planned, estimated))
    else:
        print_plan(planned, estimated, out)
    return ExitCode.OK


def run(arguments: argparse.Namespace, access: LocalAccess) -> int:
    """Start a run, or continue one, and follow it to its end."""
    talk = text_console(stderr=True)
    if arguments.site is not None:
        return _run_at_site(arguments, find_site(arguments.site), access.environment(), talk=talk)
    chosen, access = _chosen(arguments, access)
    talk.print(chosen.headline())
    if not chosen.inventory.access.shares_folder:
        # paramiko takes half a second to import, which a local run does not need.
        from payload.orchestrate.sites.start import run_on_cluster

        return run_on_cluster(
            arguments,
            chosen,
            config_of=lambda resumed: config_of(arguments, resumed=resumed, say=talk.print),
            env=access.environment(),
            talk=talk,
        )
    require_one_machine(chosen)
    with ExitStack() as held:
        return _run_here(arguments, chosen, access, talk=talk, held=held)


def _chosen(arguments: argparse.Namespace, access: LocalAccess) -> tuple[Chosen, LocalAccess]:
    """Return the inventory, and how planning asks its nodes where it is this machine's."""
    if arguments.inventory != "slurm":
        return load_cluster(arguments.inventory, env=access.environment()), access
    from payload.orchestrate.sites.allocation import allocation

    folders = (arguments.runs_dir.parent,)
    found = allocation(access.environment(), why="--inventory slurm", folders=folders)
    return found.chosen, found.access


def _run_at_site(
    arguments: argparse.Namespace, site: Site, env: Mapping[str, str], *, talk: Console
) -> int:
    """Start or continue a run at a site, and follow it to its end unless detached."""
    with ExitStack() as held:
        run = _hand_in(arguments, site, env, talk=talk, held=held)
    talk.print(f"run {run.paths.run_id}: {run.where}; everything in {run.paths.root}")
    if arguments.detach:
        talk.print(f"detached; {how_to_attach(run.paths)}")
        return ExitCode.OK
    return follow(run, arguments=arguments, talk=talk)


def _hand_in(
    arguments: argparse.Namespace,
    site: Site,
    env: Mapping[str, str],
    *,
    talk: Console,
    held: ExitStack,
) -> SiteRun:
    """Let a site start a run or go on with it; no other command does before `held` is closed."""
    resumed = find_run(arguments.runs_dir, arguments.resume) if arguments.resume else None
    if resumed is not None:
        _hold_to_resume(resumed, env, held)
    config = config_of(arguments, resumed=resumed, say=talk.print)
    auto_size = None
    if resumed is not None:
        _refuse_when_finished(resumed, config)
        auto_size = auto_batch_size(resumed.plan)
    site.check(left_open(config, auto_size=auto_size), env)
    vocab_size = _check_data(config)
    if resumed is None:
        config = settle_initial(config, vocab_size=vocab_size, say=talk.print, download=False)
    paths = resumed or RunPaths(arguments.runs_dir / (arguments.run_id or _fresh_id(config)))
    with room_for(paths):
        if resumed is None:
            create_run(arguments.runs_dir, paths.run_id)
            held.enter_context(starting(paths))
        before = _text_of(paths.config)
        paths.logs.mkdir(exist_ok=True)
        write_whole(paths.config, config.to_toml())
    try:
        return site.start(
            Order(
                paths=paths, config=config, vocab_size=vocab_size, grace_s=arguments.grace, env=env
            )
        )
    except TileforgeError:
        if resumed is None:
            shutil.rmtree(paths.root, ignore_errors=True)  # it was never a run
        elif before is not None:
            write_whole(paths.config, before)  # what was refused is no setting of the run
        raise


def _text_of(path: Path) -> str | None:
    """Return a file's text; None where it cannot be read, so that nothing is lost with it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _hold_to_resume(paths: RunPaths, env: Mapping[str, str], held: ExitStack) -> None:
    """Keep other commands from starting the run. Raises ConfigError where one has."""
    _refuse_to_resume(paths)
    _refuse_when_under_way(paths, env)
    with room_for(paths):
        held.enter_context(starting(paths))
    _refuse_to_resume(paths)  # by now another command may have started it
    _refuse_when_under_way(paths, env)


def _refuse_when_under_way(paths: RunPaths, env: Mapping[str, str]) -> None:
    """Raise ConfigError for a run that a site still has."""
    under_way = run_at_site(paths, env)
    if under_way is not None and under_way.look().alive:
        raise ConfigError(
            f"run {paths.run_id} has not ended: {under_way.where}. Follow it with: "
            + run_command("attach", paths)
        )


def _run_here(
    arguments: argparse.Namespace,
    chosen: Chosen,
    access: LocalAccess,
    *,
    talk: Console,
    held: ExitStack,
) -> int:
    """Start or continue a run on this machine; `held` is closed when it is over or detached."""
    resumed = find_run(arguments.runs_dir, arguments.resume) if arguments.resume else None
    if resumed is not None:
        _hold_to_resume(resumed, access.environment(), held)
    config = config_of(arguments, resumed=resumed, say=talk.print)
    if resumed is not None:
        _refuse_when_finished(resumed, config)
    vocab_size = _check_data(config)
    if resumed is None:
        config = _settle(config, vocab_size=vocab_size, is_local=True, talk=talk)
    others = running_here(arguments.runs_dir)
    if others:
        talk.print(f"note: {', '.join(others)} is running here too and shares the cores")
    paths = resumed or RunPaths(arguments.runs_dir / (arguments.run_id or _fresh_id(config)))
    holder = held.enter_context(access.reserve_port())
    planned = _plan(paths, config, chosen, access, vocab_size=vocab_size, port=_port(holder))
    _require_room(planned)
    _say_notes(planned, talk)
    with room_for(paths):
        if resumed is None:
            create_run(arguments.runs_dir, paths.run_id)
            held.enter_context(starting(paths))
        for sentence in make_room(paths):
            talk.print(f"warning: {sentence}")
        paths.job.unlink(missing_ok=True)  # a site's job has ended; from here on it is a run here
        planned.write(paths)
    talk.print(
        f"run {paths.run_id}: {planned.plan.world_size} rank(s) through "
        f"{planned.plan.launcher}; everything in {paths.root}"
    )
    if arguments.detach:
        return _start_detached(paths, access, arguments, talk)
    return _start_and_follow(planned, access, arguments, talk)


def _start_and_follow(
    planned: PlannedRun, access: LocalAccess, arguments: argparse.Namespace, talk: Console
) -> int:
    paths = planned.paths
    log_tail = Tail(paths.rank_log(0), from_end=True)
    metrics_tail = Tail(paths.metrics, from_end=True)
    supervisor = access.start_supervisor(paths, detached=False, grace_s=arguments.grace)
    follow_run(
        paths,
        supervisor,
        console=talk,
        train=planned.config.train,
        nodes=planned.plan.nodes,
        log_tail=log_tail,
        metrics_tail=metrics_tail,
    )
    return _report(paths, supervisor, arguments=arguments, talk=talk)


def _start_detached(
    paths: RunPaths, access: LocalAccess, arguments: argparse.Namespace, talk: Console
) -> int:
    """Return as soon as the supervisor is at work."""
    supervisor = access.start_supervisor(paths, detached=True, grace_s=arguments.grace)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and supervisor.poll() is None:
        state = last_record(RunState, paths.state)
        if state is not None and state.supervisor_pid == supervisor.pid:
            talk.print(f"detached. Look with: {run_command('status', paths)}; also: logs -f, stop")
            # It outlives this process on purpose; nobody will wait for it here.
            supervisor.returncode = 0
            return ExitCode.OK
        time.sleep(0.05)
    return _report(paths, supervisor, arguments=arguments, talk=talk)


def _report(
    paths: RunPaths,
    supervisor: subprocess.Popen[bytes],
    *,
    arguments: argparse.Namespace,
    talk: Console,
) -> int:
    """The table at the end, or the failure in the failing rank's own words."""
    status = supervisor.wait()
    if not paths.root.is_dir():
        talk.print(
            f"error: {paths.root} was removed while the run went on, with all that it had saved. "
            "Start a new run."
        )
        return status if status > 0 else ExitCode.TRAINING
    summary = last_record(Summary, paths.summary)
    state = last_record(RunState, paths.state)
    # Without a state of its own, what lies there is the last attempt's.
    began = state is not None and state.supervisor_pid == supervisor.pid
    if status < 0 or summary is None or state is None or not began:
        _say_supervisor_failed(paths, status=status, talk=talk)
        return ExitCode.RANK_LOST if status < 0 else status or ExitCode.TRAINING
    say_end(paths, summary=summary, state=state, arguments=arguments, talk=talk)
    if arguments.samples and status == ExitCode.OK and state.status == "finished":
        talk.print("samples: the model before and after the run continues prompts; Ctrl-C skips it")
        problem = add_samples(paths)
        if problem:
            talk.print(f"note: the report has no samples: {printable(problem)}")
    if status == ExitCode.OK and state.status == "stopped":
        # Whoever stopped it: what a script would do with a finished run must not be done.
        return INTERRUPTED
    return status


def _say_supervisor_failed(paths: RunPaths, *, status: int, talk: Console) -> None:
    if status < 0:
        talk.print(
            f"error: the supervisor was killed by signal {-status} ({signal.Signals(-status).name})"
            "; the ranks save and stop"
        )
        return
    said = log_tail(paths.supervisor_log)
    talk.print(said[-1] if said else f"error: the supervisor ended with {status}")
    talk.print(f"log: {paths.supervisor_log}")


def _plan(
    paths: RunPaths,
    config: RunConfig,
    chosen: Chosen,
    access: LocalAccess,
    *,
    vocab_size: int | None,
    port: int,
) -> PlannedRun:
    return plan_run(
        paths,
        config=config,
        chosen=chosen,
        access=access,
        vocab_size=vocab_size,
        work_dir=Path.cwd(),
        port=port,
        auto_size=auto_batch_size(paths.plan),
    )


def config_of(
    arguments: argparse.Namespace,
    *,
    resumed: RunPaths | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> RunConfig:
    """The config file's, the resumed run's, or all defaults; with --set on top.

    A micro-batch of `auto` is what a resumed run has settled on.
    """
    if arguments.config is not None:
        config = load_run_config(arguments.config, overrides=arguments.overrides)
    elif resumed is not None:
        config, warning = config_to_resume(resumed, overrides=arguments.overrides)
        if warning:
            say(f"warning: {warning}")
    else:
        return parse_run_config("", overrides=arguments.overrides, where="defaults")
    if resumed is not None:
        with suppress(ConfigError):
            config = as_recorded(config, config_to_resume(resumed, overrides=())[0])
    return config


def _refuse_to_resume(paths: RunPaths) -> None:
    if is_copy(paths):
        raise ConfigError(
            f"run {paths.run_id} is on a cluster, this is its copy. Name the cluster with "
            "--inventory FILE."
        )
    if is_supervised(paths):
        raise ConfigError(
            f"run {paths.run_id} is running. Look at it with: " + run_command("status", paths)
        )


def _refuse_when_finished(paths: RunPaths, config: RunConfig) -> None:
    summary = known_summary(paths)
    if summary and summary.status == "finished" and summary.steps >= config.train.steps:
        raise ConfigError(
            f"run {paths.run_id} is finished after {summary.steps} steps. To train on, raise "
            f"train.steps: --set train.steps={2 * summary.steps}"
        )


def _check_data(config: RunConfig) -> int:
    return check_data(
        Path(config.data.dir),
        sequence_length=config.data.sequence_length,
        task=config.task.kind,
    )


def _settle(
    config: RunConfig, *, vocab_size: int | None, is_local: bool, talk: Console
) -> RunConfig:
    """Check what can be known before the start; the config then names what the run begins with."""
    if is_local:
        require_packages_here(config.engine, config.distributed, quantize=config.model.quantize)
    return settle_initial(config, vocab_size=vocab_size, say=talk.print, download=is_local)


def _require_room(planned: PlannedRun) -> None:
    size = planned.plan.arithmetic.checkpoint_bytes
    require_room(planned.config.train, checkpoint_bytes=size, run=planned.paths.root)


def _fresh_id(config: RunConfig) -> str:
    return new_run_id(config.run.name, now=datetime.now(), suffix=secrets.token_hex(2))


def _port(holder: socket.socket) -> int:
    return int(holder.getsockname()[1])


def _say_notes(planned: PlannedRun, talk: Console) -> None:
    for note in planned.plan.notes:
        talk.print(f"note: {note}")
    for line in missing_notes(planned.config):
        talk.print(line)


def _strategies_json(planned: PlannedRun) -> str:
    return json.dumps({"strategies": [asdict(each) for each in planned.strategies]}, indent=2)


def _plan_json(planned: PlannedRun, estimated: Estimate) -> str:
    nodes = range(len(planned.inventory.nodes))
    return json.dumps(
        {
            "inventory": asdict(planned.inventory),
            "hosts": planned.hosts(),
            "ranks": [asdict(rank) for rank in planned.placement.ranks],
            "config": asdict(planned.config),
            "free_memory_bytes": planned.free_memory_bytes,
            "plan": asdict(planned.plan),
            "estimate": asdict(estimated),
            "accelerate": [planned.accelerate(node_rank) for node_rank in nodes],
        },
        indent=2,
    )
