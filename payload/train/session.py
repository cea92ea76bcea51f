"""Runs the training of one rank from start to end: checks, model, calibration, training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

from accelerate import Accelerator

from payload.config.deepspeed_settings import render_deepspeed
from payload.config.engine_packages import require_fp8_package
from payload.config.model_checks import require_split
from payload.config.run_config import RunConfig
from payload.config.settings import AUTO
from payload.config.training_sections import DtypeChoice
from payload.core.dtype import Dtype
from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.estimates.batch_size import resolve_batch, with_recorded_size, with_size
from payload.formats.prepare_hints import no_range_hashes
from payload.machines.core_speed import has_bf16
from payload.machines.core_use import CoreUse
from payload.machines.rank_mesh import require_tensor_ranks_on_a_node
from payload.run_record.approved_settings import record_approved
from payload.run_record.metrics_log import stream_metrics
from payload.run_record.run_files import RunPaths
from payload.run_record.run_identity import ensure_identity
from payload.train.estimate_text import predict
from payload.train.gemm_and_network_benchmark import Calibration, calibrate
from payload.train.models.attention import load_varlen_attention
from payload.train.models.base import CausalLM
from payload.train.models.float8 import convert_linears
from payload.train.models.lora import cast_base_to_bf16, cast_base_to_fp32
from payload.train.optimizer_state import restore_optimizer
from payload.train.parts import Observer, TrainContext
from payload.train.rank_metrics_and_heartbeat import Heartbeat, MetricsFile
from payload.train.ranks.world import World
from payload.train.setup import (
    Start,
    earlier_config,
    find_start,
    require_disk_space,
)
from payload.train.speed_refresh import refresh_known_speed
from payload.train.start_clock import StartClock
from payload.train.strategies.registry import choose_strategy
from payload.train.strategies.shard_calibration import ShardingSetup
from payload.train.summary import SummaryFile
from payload.train.tasks.base import Task
from payload.train.tasks.registry import open_task
from payload.train.torch_engines import apply_engine, require_engine, require_strategy
from payload.train.trainer import Outcome, Trainer

log = logging.getLogger(__name__)


def train(
    config: RunConfig,
    *,
    paths: RunPaths,
    world: World,
    stop_requested: Callable[[], bool],
    clock: StartClock,
    observer: Observer | None = None,
    named: Mapping[str, str] | None = None,
) -> Outcome:
    """Train on this rank from the run's newest checkpoint, or from the start.

    The process group must be initialized. If the data or the model is invalid, no run folder is
    created. `observer` is notified of this rank's progress. `named` holds the settings that the
    user approved for this run. Rank 0 writes run.toml, metrics.jsonl and summary.json, even after a
    failure. Raises TileforgeError, and RuntimeError if a different rank has disappeared.
    """
    observer = observer or Observer()
    with SummaryFile(paths, world) as summary:
        heartbeat = Heartbeat(paths, world)
        heartbeat.report(step=0, phase="load")
        require_engine(config.engine)
        require_strategy(config.distributed)
        require_fp8_package(config.precision)
        if config.precision.fp8 == "on":
            world.require_fp8()
        config.require_even(world.world_size)
        if config.distributed.splits_model() and not world.is_cpu:
            raise ConfigError(
                f"distributed.tensor_parallel = {config.distributed.tensor_parallel}, "
                f"pipeline_parallel = {config.distributed.pipeline_parallel}: these need CPUs, but "
                "this rank is on a CUDA device. Set device.kind to 'cpu', or set both sizes to 1."
            )
        if world.world_size > 1:
            tensor = config.distributed.tensor_parallel
            require_tensor_ranks_on_a_node(tensor, ranks_per_node=world.local_world_size)
        task = open_task(config)
        clock.lap("data")
        observer.before_model()
        start = find_start(config, task, paths=paths, world=world)
        require_split(start.model.spec, config)
        config = _resolve_batch(config, start, paths=paths, world=world)
        clock.lap("model")
        # Every rank creates the folder, because nodes need not share a disk.
        paths.root.mkdir(parents=True, exist_ok=True)
        if world.is_main:
            write_whole(paths.config, config.to_toml())
            is_new = start.state is None
            settled = ensure_identity(paths, is_new=is_new, say=log.warning)
            start = replace(start, identity=settled.identity)
            if named:
                record_approved(paths, named)
        summary.begin()
        heartbeat.report(step=0, phase="calibration")
        own_cores = CoreUse()
        calibration = calibrate(
            world,
            _dtype_choice(config, start),
            quantizes=config.model.quantize != "none",
            sharded=ShardingSetup.of(config.distributed, start.model.spec, world=world),
        )
        refresh_known_speed(calibration, world, others_share=own_cores.others())
        clock.lap("calibration")
        summary.calibrated(
            peak_flops_per_s=calibration.peak_flops_per_s,
            dequantized_per_s=calibration.dequantized_per_s,
        )
        outcome, wall_s = _train(
            config,
            paths=paths,
            world=world,
            task=task,
            start=start,
            calibration=calibration,
            heartbeat=heartbeat,
            stop_requested=stop_requested,
            clock=clock,
            summary=summary,
            observer=observer,
        )
        summary.end("stopped" if outcome.stopped else "finished", wall_s=wall_s)
    return outcome


def _dtype_choice(config: RunConfig, start: Start) -> DtypeChoice:
    """Return the dtype to use: bf16 for fp8; with `auto`, a resumed run keeps its earlier dtype."""
    if config.wants_bf16():
        return "bf16"
    if config.precision.dtype == "auto" and start.state is not None:
        return start.state.dtype
    return config.precision.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResolvedBatch:
    """Rank 0's message to the other ranks: the micro-batch size that `auto` resolves to."""

    size: int
    checkpointing: Literal["off", "auto", "on"]


def _resolve_batch(config: RunConfig, start: Start, *, paths: RunPaths, world: World) -> RunConfig:
    """Return the config with `batch.micro_batch_size` resolved to a number.

    For most runs, the plan already has the number. A resumed run keeps its micro-batch size.
    """
    if config.batch.micro_batch_size != AUTO:
        return config
    free = min(world.gather(world.free_bytes(), int))
    emulates_bf16 = any(world.gather(world.is_cpu and has_bf16() is False, bool))
    found = None
    if world.is_main:
        earlier = earlier_config(paths)
        kept = (
            with_recorded_size(config, earlier, world_size=world.world_size) if earlier else config
        )
        chosen = _dtype_choice(config, start)
        expected: Dtype = "fp32" if emulates_bf16 else "bf16"
        decided, note = resolve_batch(
            kept.on_device(world.kind),
            start.model.trained_spec(),
            dtype=expected if chosen == "auto" else chosen,
            world_size=world.world_size,
            ranks_per_node=world.local_world_size,
            free_bytes=free,
        )
        if note is not None:
            log.info(f"memory    {note}")
        found = _ResolvedBatch(
            size=decided.batch.micro_batch(),
            checkpointing=decided.memory.activation_checkpointing,
        )
    agreed = world.broadcast(found, _ResolvedBatch)
    return with_size(config, agreed.size, checkpointing=agreed.checkpointing)


def _train(
    config: RunConfig,
    *,
    paths: RunPaths,
    world: World,
    task: Task,
    start: Start,
    calibration: Calibration,
    heartbeat: Heartbeat,
    stop_requested: Callable[[], bool],
    clock: StartClock,
    summary: SummaryFile,
    observer: Observer,
) -> tuple[Outcome, float]:
    resumed_at_step = start.state.step if start.state else 0
    heartbeat.report(step=resumed_at_step, phase="start")
    if world.is_main:
        require_disk_space(config, start.model.trained_spec(), paths=paths)
        if not task.has_range_hashes():
            log.warning(no_range_hashes(task.folder))
        predicted = predict(
            config, spec=start.model.trained_spec(), task=task, world=world, calibration=calibration
        )
        for line in predicted.lines:
            log.info(line)
        summary.predicted(step_s=predicted.step_s)
    if start.state:
        log.info(f"resuming after step {resumed_at_step} from {start.checkpoint}")
    with (
        MetricsFile(paths, resumed_at_step=resumed_at_step) if world.is_main else nullcontext() as (
            metrics
        )
    ):
        context = _assemble(
            config,
            paths=paths,
            world=world,
            task=task,
            calibration=calibration,
            start=start,
            metrics=metrics,
            heartbeat=heartbeat,
            stop_requested=stop_requested,
            clock=clock,
            observer=observer,
        )
        for note in start.model.speed_notes():
            log.info(f"model     {note}")
        trainer = Trainer(context, start=start.state)
        evaluate_first = world.broadcast(
            _lacks_evaluation(config, paths, resumed_at_step) if world.is_main else None, bool
        )
        log.info(clock.line())
        summary.ready(clock.seconds)
        observer.ready(context)
        outcome = trainer.run(evaluate_first=evaluate_first)
        heartbeat.report(step=outcome.step, phase="end")
    return outcome, trainer.wall_s()


def _assemble(
    config: RunConfig,
    *,
    paths: RunPaths,
    world: World,
    task: Task,
    calibration: Calibration,
    start: Start,
    metrics: MetricsFile | None,
    heartbeat: Heartbeat,
    stop_requested: Callable[[], bool],
    clock: StartClock,
    observer: Observer,
) -> TrainContext:
    """Wrap the model, and set rank 0's parameters and optimizer state on every rank."""
    engine = config.used_engine()
    if not world.is_cpu:
        start.model.to(world.device)
        start.model.compute_loss_in_chunks(compiles=engine.compile)
        start.model.attends_by_document = world.has_flash_attention() and load_varlen_attention()
        log.info(f"device    {world.device}: without the project's kernels, which need a CPU")
        engine = replace(engine, kernels="off")
    if calibration.dtype == "bf16":
        cast_base_to_bf16(start.model)
    else:
        cast_base_to_fp32(start.model)
    if _checkpoints_layers(config, start.model, world=world, calibration=calibration):
        start.model.enable_checkpointing()
    if world.is_main and config.distributed.strategy == "zero3":
        write_whole(paths.deepspeed_config, render_deepspeed(config, dtype=calibration.dtype))
    if config.precision.fp8 != "off":
        log.info(f"fp8       {convert_linears(start.model, config.precision)}")
    strategy = choose_strategy(config.distributed, world)
    strategy.wrap(start.model)
    optimizers = strategy.optimizers(start.model, config, dtype=calibration.dtype)
    step = start.state.step if start.state else 0
    heartbeat.report(step=step, phase="kernels")
    wrapped = apply_engine(
        start.model,
        optimizers,
        settings=engine,
        world=world,
        setting=config.rank_setting(dtype=calibration.dtype, world_size=world.world_size),
    )
    accelerator = Accelerator(
        cpu=world.is_cpu,
        mixed_precision="bf16" if calibration.dtype == "bf16" else "no",
    )
    # evaluation_mode: Accelerate handles precision only, no DDP; the strategy replaces it.
    trained = accelerator.prepare_model(wrapped, device_placement=False, evaluation_mode=True)
    clock.lap("kernels")
    heartbeat.report(step=step, phase="weights")
    strategy.attach(start.model)
    if start.state is not None:
        restore_optimizer(optimizers, start.checkpoint, strategy=strategy)
    optimizers.make_state()
    clock.lap("weights")
    return TrainContext(
        config=config,
        world=world,
        paths=paths,
        task=task,
        calibration=calibration,
        accelerator=accelerator,
        model=start.model,
        trained=trained.train(),
        optimizers=optimizers,
        strategy=strategy,
        tokenizer=start.tokenizer,
        copied=start.copied,
        identity=start.identity,
        base=start.base,
        metrics=metrics,
        heartbeat=heartbeat,
        stop_requested=stop_requested,
        observer=observer,
    )


def _checkpoints_layers(
    config: RunConfig, model: CausalLM, *, world: World, calibration: Calibration
) -> bool:
    """Return whether the backward pass recomputes layers; log the reason for `auto`."""
    setting = config.memory.activation_checkpointing
    if setting != "auto":
        return setting == "on"
    # All ranks must decide alike: a recomputed layer repeats its communication with other ranks.
    free = min(world.gather(world.free_bytes() // world.local_world_size, int))
    estimate = model.trained_spec().rank_memory_bytes(
        config.on_device(world.kind).rank_setting(
            dtype=calibration.dtype, world_size=world.world_size
        )
    )
    if estimate <= free:
        return False
    log.info(
        "memory    activation checkpointing is on, because a rank would otherwise need "
        f"{estimate / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free"
    )
    return True


def _lacks_evaluation(config: RunConfig, paths: RunPaths, step: int) -> bool:
    """Return whether an evaluation is due at `step` and missing from metrics.jsonl."""
    every = config.train.eval_every
    is_due = step in (0, config.train.steps) or (every > 0 and step % every == 0)
    rows = stream_metrics(paths.metrics)
    return is_due and not any("val_loss" in row and row["step"] == step for row in rows)
