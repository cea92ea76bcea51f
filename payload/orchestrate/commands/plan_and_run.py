"""`plan` and `run`: plan a run on the selected machines, or start and follow it."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial

from rich.console import Console

from payload.config.run_config import RunConfig
from payload.core.durations import in_words
from payload.core.errors import ConfigError, DataError, ExitCode
from payload.core.printable_text import printable
from payload.estimates.batch_size import with_auto_size
from payload.formats.checkpoint_listing import newest_valid
from payload.formats.data_folder import DataMeta
from payload.launch.plan_record import auto_batch_size
from payload.machines.speed_process import measured_speed
from payload.orchestrate.commands.config_choice import load_config, require_choice
from payload.orchestrate.commands.export_job_file import export, require_no_export_options
from payload.orchestrate.commands.inventory_site import site_of
from payload.orchestrate.commands.run_commands_options import PlanOptions, RunOptions
from payload.orchestrate.follow.end_of_run import next_lines, sample_lines
from payload.orchestrate.follow.follow import EndOptions, Tails, follow
from payload.orchestrate.follow.run_text import (
    Estimate,
    estimate,
    has_measured_speed,
    print_plan,
    strategy_table,
)
from payload.orchestrate.hardware.nvidia import gpu_need
from payload.orchestrate.inventories.chosen import ResolvedInventory, load_cluster
from payload.orchestrate.inventories.planned_machines import (
    PLANNED,
    machines_like,
    machines_of_type,
)
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.at_risk import limit_note, run_warning
from payload.orchestrate.runs.launcher_choice import require_fit_for_job
from payload.orchestrate.runs.planning import resolve_placement
from payload.orchestrate.runs.resolved_plan import ResolvedPlan
from payload.orchestrate.runs.run_index import all_runs, resumable_run
from payload.orchestrate.runs.run_input_checks import (
    check_data,
    require_known_sizes,
    settle_initial,
)
from payload.orchestrate.runs.run_request import RunRequest
from payload.orchestrate.runs.site import Site
from payload.orchestrate.sites.local import is_on_these_cores, require_disk
from payload.orchestrate.sites.registry import find_site, run_at_site
from payload.orchestrate.terminal.console import confirm, text_console
from payload.orchestrate.terminal.narrow import print_message
from payload.run_record.approved_settings import (
    is_on_hub,
    override_keys,
    require_approved,
    settings_to_approve,
    unapproved_settings,
)
from payload.run_record.report_and_samples_process import add_samples
from payload.run_record.run_files import RunPaths, new_run_id, require_own_folders
from payload.run_record.run_repair import known_summary
from payload.run_record.run_samples import read_samples
from payload.storage.store_access import fetch_data_to_cache, resolve_results


def plan(options: PlanOptions, access: LocalAccess) -> int:
    """Print where a run would be placed, its memory and its time, without starting anything."""
    if options.export is not None:
        return export(options, access, engine_name=options.export)
    require_no_export_options(options)
    talk, out = text_console(stderr=True), text_console(stderr=False)
    config = load_config(options)
    chosen, access = _planned_inventory(options, access, config)
    print_message(talk, chosen.headline())
    site = site_of(chosen, access, talk=talk)
    config = resolve_results(config, bucket=chosen.inventory.bucket)
    if options.site is not None:
        print_message(talk, "note: the job decides its nodes, and starts the ranks with srun")
    elif chosen.inventory.cluster != PLANNED:
        _warn_without_store(chosen, config, talk=talk)
    try:
        require_choice(options, config)
        meta: DataMeta | None = _check_data(config)
    except DataError as error:
        meta = None
        print_message(talk, f"note: a run would fail: {error}")
    placed = site.check(config, access.environment())
    try:
        config = _settle(config, site, meta=meta, talk=talk)
    except ConfigError as error:
        require_known_sizes(config)
        print_message(talk, f"note: a run would fail: {error}")
    paths = RunPaths(options.runs_dir / (options.run_id or _new_id(config)))
    vocab_size = None if meta is None else meta.vocab_size
    # Measured after the checks: it takes seconds, and an error must come immediately.
    if is_on_these_cores(chosen.inventory, config):
        resolve_placement(with_auto_size(config, auto_size=auto_batch_size(paths.plan)), chosen)
        say = partial(print_message, talk)
        speed = measured_speed(access.environment(), now_unix=time.time(), say=say)
        access = access.with_speed(speed)
        site = site_of(chosen, access, talk=talk)
    planned = site.plan(
        paths, config, vocab_size=vocab_size, placed=placed, mean_tokens=options.mean_tokens
    )
    if site.uses_this_environment:
        try:
            require_disk(planned)
        except ConfigError as error:
            print_message(talk, f"note: a run would fail: {error}")
    for note in planned.notes():
        print_message(talk, note)
    estimated = estimate(
        planned,
        data=config.data.folder(),
        earlier=all_runs(options.runs_dir),
        is_local=site.uses_this_environment,
        samples=options.samples,
        expected_val_tokens=options.val_tokens or 0,
    )
    if options.strategies:
        out.print(
            _strategies_json(planned) if options.json else strategy_table(planned, width=out.width)
        )
    elif options.json:
        out.print(_plan_json(planned, estimated))
    else:
        print_plan(planned, estimated, out, job=_job_text(options, planned, access))
    return ExitCode.OK


def _job_text(options: PlanOptions, planned: ResolvedPlan, access: LocalAccess) -> str | None:
    """Return the job's batch script and the commands that submit it; None without --site."""
    if options.site is None:
        return None
    from payload.orchestrate.sites.slurm import job_text

    local = replace(planned, paths=RunPaths(options.runs_dir / planned.paths.run_id))
    return job_text(local, access=access)


def run(options: RunOptions, access: LocalAccess) -> int:
    """Start or resume a run, and follow it until it ends."""
    if options.profile is not None:
        profiled = f"train.profile_step={options.profile}"
        options = replace(options, overrides=[*options.overrides, profiled])
    talk, chosen = text_console(stderr=True), None
    site: Site
    if options.site is not None:
        site = find_site(options.site)
    else:
        chosen, access = _resolved_inventory(options, access)
        print_message(talk, chosen.headline())
        site = site_of(
            chosen,
            access,
            talk=talk,
            argument=options.inventory,
            ssh_key=options.ssh_key,
            quick=options.quick,
        )
    with ExitStack() as held:
        bucket = None if chosen is None else chosen.inventory.bucket
        request = _request(options, site, access, bucket=bucket, talk=talk, held=held)
        request = replace(request, confirm=partial(_confirm_long, options, site))
        if chosen is not None:
            _warn_without_store(chosen, request.config, talk=talk)
        tails = Tails(request.paths)
        started = site.start(request)
    with closing(started):
        line = started.start_line()
        if line is not None:
            talk.print(line)
        if options.detach and not started.was_running:
            message = started.detached()
            if message is not None:
                talk.print(message)
                return ExitCode.OK
        end = EndOptions(json=options.json, open=options.open, inventory=options.inventory)
        is_ours = started.paths == request.paths
        status = follow(started, options=end, talk=talk, tails=tails if is_ours else None)
    if options.samples and status == ExitCode.OK and site.uses_this_environment:
        _add_samples(started.paths, talk)
    if options.next and status == ExitCode.OK:
        talk.print("\n".join(next_lines(started.paths, request.config)))
    return status


def _add_samples(paths: RunPaths, talk: Console) -> None:
    """Generate samples with the model before and after the run, and print them."""
    talk.print("samples: generating, up to two minutes; Ctrl-C skips them")
    problem = add_samples(paths, say=lambda line: talk.print(f"samples: {printable(line)}"))
    if problem:
        print_message(talk, f"note: the report has no samples: {printable(problem)}")
        return
    out = text_console(stderr=False)
    out.print("\n".join(sample_lines(read_samples(paths.samples), width=out.width)))


_LONG_S = 86400.0
"""Predicted time in seconds above which `run` prompts for confirmation."""


def _confirm_long(options: RunOptions, site: Site, planned: ResolvedPlan) -> None:
    """Require a confirmation for a run that is predicted to take more than a day.

    Raises ConfigError if the operator declines, and UsageError without a terminal.
    """
    hours = planned.config.limits.max_hours
    # A Slurm job has a time limit, and no terminal for an answer.
    if options.yes or options.inventory == "slurm":
        return
    if hours is not None and hours * 3600 <= _LONG_S:
        return
    earlier = all_runs(options.runs_dir)
    is_on_gpus = gpu_need(planned.config, planned.inventory.nodes) is not None
    if is_on_gpus and not has_measured_speed(planned, earlier=earlier):
        # The estimate is for the nodes' CPU cores, which are much slower.
        return
    found = estimate(
        planned,
        data=planned.config.data.folder(),
        earlier=earlier,
        is_local=site.uses_this_environment,
        samples=options.samples,
    )
    if found.seconds <= _LONG_S:
        return
    question = f"The run takes about {in_words(found.seconds)}, {found.basis}. Start it?"
    if not confirm(question, assume_yes=False):
        raise ConfigError("nothing was started. For a shorter run: --set train.steps=COUNT")


def _warn_without_store(chosen: ResolvedInventory, config: RunConfig, *, talk: Console) -> None:
    inventory = chosen.inventory
    warning = run_warning(inventory.source, config, head=inventory.head.name)
    for message in (warning, limit_note(inventory.source, config)):
        if message is not None:
            print_message(talk, message)


def _planned_inventory(
    options: PlanOptions, access: LocalAccess, config: RunConfig
) -> tuple[ResolvedInventory, LocalAccess]:
    """Return the inventory to plan for: the selected inventory, or machines that do not exist
    yet."""
    if options.machine_type is not None:
        return machines_of_type(options.machine_type, nodes=options.nodes or 1), access
    chosen, access = _resolved_inventory(options, access)
    nodes = options.nodes
    if options.site is not None:
        require_fit_for_job(config)
        nodes = nodes or config.slurm.nodes
    if nodes is not None:
        head = chosen.inventory.head
        chosen = machines_like(head, domains=chosen.domains.get(head.name), nodes=nodes)
    return chosen, access


def _resolved_inventory(
    options: PlanOptions | RunOptions, access: LocalAccess
) -> tuple[ResolvedInventory, LocalAccess]:
    """Return the inventory, and the machine profile from which to plan."""
    if options.inventory != "slurm":
        return load_cluster(options.inventory, env=access.environment()), access
    from payload.orchestrate.sites.allocation import allocation

    folders = (options.runs_dir.parent,)
    found = allocation(access.environment(), why="--inventory slurm", folders=folders)
    return found.chosen, found.access


def _request(
    options: RunOptions,
    site: Site,
    access: LocalAccess,
    *,
    bucket: str | None,
    talk: Console,
    held: ExitStack,
) -> RunRequest:
    """Return the run request for the site, after all checks that are possible before the start.

    `bucket` is the cluster's own bucket, or None. Raises ConfigError, and PreflightError for a
    start that would certainly fail at the site.
    """
    env, code_env = access.environment(), access.code_environment()
    resumed, named = None, override_keys(options.overrides)
    if options.resume:
        resumed, overrides = resumable_run(
            options.resume,
            runs_dir=options.runs_dir,
            overrides=options.overrides,
            settings=lambda: resolve_results(load_config(options), bucket=bucket),
            has_config=options.config_path is not None,
            env=code_env,
            say=talk.print,
        )
        require_own_folders(resumed)
        options = replace(options, overrides=overrides)
        if any(each.startswith("storage.results=") for each in overrides):
            named |= {"storage.results"}
        site.hold_to_resume(resumed, partial(run_at_site, resumed, env), held, talk)
    config, auto_size = load_config(options, resumed=resumed, say=talk.print), None
    reads_init = resumed is None or options.samples or _reads_init(resumed, config, site)
    if resumed is not None and options.config_path is None:
        require_approved(resumed, settings_to_approve(config, reads_init=reads_init), named=named)
    config = resolve_results(config, bucket=bucket)
    if resumed is not None:
        _refuse_when_finished(resumed, config)
        auto_size = auto_batch_size(resumed.plan)
        reads_base = config.adapter.is_on() or resumed.newest_checkpoint() is None
        if "model.init" in named and not reads_base:
            talk.print(
                "note: model.init is not read: the run resumes from its own checkpoint. To train "
                "other weights, start a new run"
            )
    require_choice(options, config, resumed=resumed is not None)
    placed = site.check(with_auto_size(config, auto_size=auto_size), env)
    fetch_data_to_cache(config, env=code_env, say=talk.print)
    meta = _check_data(config)
    if resumed is None:
        config = _settle(config, site, meta=meta, talk=talk)
    return RunRequest(
        paths=resumed or RunPaths(options.runs_dir / (options.run_id or _new_id(config))),
        config=config,
        vocab_size=meta.vocab_size,
        resumes=resumed is not None,
        detach=options.detach,
        grace_s=options.grace,
        env=env,
        talk=talk,
        held=held,
        named=settings_to_approve(config, reads_init=reads_init),
        placed=placed,
    )


def _reads_init(resumed: RunPaths, config: RunConfig, site: Site) -> bool:
    """Return False if a checkpoint of the resumed run replaces `model.init`, a model on the hub.

    Ranks on other machines read the checkpoint in their own folder. A run with an adapter always
    reads `model.init`, the base weights.
    """
    init = settings_to_approve(config, of=["model.init"])
    if (
        not site.uses_this_environment
        or config.adapter.is_on()
        or not unapproved_settings(resumed, init)
    ):
        return True
    return not is_on_hub(config.model.init) or newest_valid(resumed.checkpoints) is None


def _refuse_when_finished(paths: RunPaths, config: RunConfig) -> None:
    summary = known_summary(paths)
    if summary and summary.status == "finished" and summary.steps >= config.train.steps:
        raise ConfigError(
            f"run {paths.run_id} finished after {summary.steps} steps. To continue, raise "
            f"train.steps: --set train.steps={2 * summary.steps}"
        )


def _check_data(config: RunConfig) -> DataMeta:
    return check_data(
        config.data.folder(),
        sequence_length=config.data.sequence_length,
        task=config.task.data(),
    )


def _settle(config: RunConfig, site: Site, *, meta: DataMeta | None, talk: Console) -> RunConfig:
    """Return the config with model.init resolved. Raises ConfigError."""
    return settle_initial(config, meta=meta, say=talk.print, download=site.uses_this_environment)


def _new_id(config: RunConfig) -> str:
    return new_run_id(config.run.name, now=datetime.now(), suffix=secrets.token_hex(2))


def _strategies_json(planned: ResolvedPlan) -> str:
    return json.dumps({"strategies": [asdict(each) for each in planned.strategies]}, indent=2)


def _plan_json(planned: ResolvedPlan, estimated: Estimate) -> str:
    nodes = range(len(planned.inventory.nodes))
    return json.dumps(
        {
            "inventory": asdict(planned.inventory),
            "hosts": planned.hosts(),
            "ranks": [asdict(rank) for rank in planned.placement.ranks],
            "config": asdict(planned.config),
            "free_memory_bytes": planned.free_memory_bytes,
            "dtype": planned.predicted.dtype(),
            "plan": asdict(planned.plan),
            "estimate": asdict(estimated),
            "accelerate": [planned.accelerate(node_rank) for node_rank in nodes],
        },
        indent=2,
    )
