"""The predicted cost of a run, logged before training: sizes, memory, time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from payload.config.run_config import RunConfig
from payload.estimates.gradient_buckets import gradient_bytes
from payload.estimates.network import LOCAL_LINK, Link, sends_per_byte
from payload.estimates.quantized_cost import dequantize_s, dequantized_times, quantized_weights
from payload.estimates.run_time import Speed
from payload.estimates.step_time import predict_step
from payload.machines.speed_process import cached_speed
from payload.models.spec import ModelSpec
from payload.train.gemm_and_network_benchmark import Calibration
from payload.train.ranks.world import World
from payload.train.tasks.base import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted cost of a run."""

    lines: Sequence[str]
    """Log lines with the run's numbers, from parameters to predicted time."""
    step_s: float
    """Seconds per step."""


def predict(
    config: RunConfig,
    *,
    spec: ModelSpec,
    task: Task,
    world: World,
    calibration: Calibration,
) -> Prediction:
    """Return the run's sizes, memory and time, predicted from the calibration."""
    config = config.on_device(world.kind)
    batch, meta = config.batch, task.meta
    tokens = round(batch.global_batch_size * task.mean_tokens())
    accumulation = config.passes(world.world_size)
    all_tokens = tokens * config.train.steps
    memory = config.memory_bytes(spec, dtype=calibration.dtype, world_size=world.world_size)
    time_lines, step_s = _time(
        config,
        tokens,
        val_tokens=meta.val_tokens,
        spec=spec,
        world=world,
        calibration=calibration,
    )
    lines = [
        f"model     {spec.num_params() / 1e6:.1f}M parameters: {spec.summary()}",
        f"data      {meta.train_tokens:,} training and {meta.val_tokens:,} validation "
        f"tokens from {meta.source}",
        f"batch     about {tokens:,} tokens a step: {batch.global_batch_size} sequences; "
        f"{world.world_size} rank(s) x {batch.micro_batch()} sequences x {accumulation} "
        "micro-batch(es)",
        f"run       {config.train.steps} steps = {all_tokens:,} tokens = "
        f"{all_tokens / meta.train_tokens:.2f} epochs",
        f"precision {calibration.dtype} ({calibration.reason}); peak "
        f"{calibration.peak_flops_per_s / 1e12:.2f} TFLOP/s measured over all ranks",
        f"memory    about {memory / 2**30:.1f} GiB a rank",
        *_sync_check(config, spec=spec, world=world),
        *_dequantizing(config, spec=spec, world=world, calibration=calibration),
        *time_lines,
    ]
    return Prediction(lines=lines, step_s=step_s)


def _sync_check(config: RunConfig, *, spec: ModelSpec, world: World) -> list[str]:
    """Return the log line on the sync check, or no line if every rank has the whole model."""
    mesh = config.distributed.mesh(world.world_size)
    if mesh.replicate == world.world_size:
        return []
    return [f"check     {mesh.describe()}: compares {mesh.compared(tied=spec.is_tied())}"]


def _dequantizing(
    config: RunConfig, *, spec: ModelSpec, world: World, calibration: Calibration
) -> list[str]:
    """Return the log line on the time of dequantising 4-bit linears, if it was measured."""
    rate = calibration.dequantized_per_s
    if rate is None:
        return []
    seconds = dequantize_s(config, spec, world_size=world.world_size, weights_per_s=rate)
    weights = quantized_weights(spec)
    times = "twice" if dequantized_times(config) == 2 else "three times"
    return [
        f"4 bits    {seconds:.2g} s a step to dequantise {weights / 1e6:,.0f}M weights {times} a "
        f"micro-batch, measured {rate / 1e9:.2f}G weights/s; 4-bit layers run without our kernels"
    ]


def _time(
    config: RunConfig,
    tokens: int,
    *,
    val_tokens: int,
    spec: ModelSpec,
    world: World,
    calibration: Calibration,
) -> tuple[list[str], float]:
    """Return the log lines on the gradient exchange and the time, and the seconds per step."""
    config = config.computing_in(calibration.dtype)
    speed = calibration.all_reduce_bytes_per_s
    # One rank has no network traffic.
    link = Link(bytes_per_s=1.0 if speed is None else speed * sends_per_byte(world.world_size))
    threads, known = torch.get_num_threads(), None
    if world.is_cpu and world.nodes() == 1:
        link = replace(link, busy_s_per_byte=LOCAL_LINK.busy_s_per_byte)
        # The plan of a run on this machine reads the same measurement.
        known = cached_speed(os.environ, cores=world.world_size * threads)
    predicted = predict_step(
        config,
        spec,
        peak_flops_per_s=calibration.peak_flops_per_s,
        network=link.network(world.world_size, shards=calibration.shards),
        threads=threads,
        tokens=tokens,
        speed=known.rank_speed(calibration.dtype, threads=threads) if known else None,
    )
    compute, step = predicted.compute, predicted.parts
    step_s = step.total_s()
    # Sequences of a task can be shorter than data.sequence_length, so the tokens are counted here.
    pace = Speed(
        flops_per_step=tokens * spec.flops_per_token(),
        tokens_per_step=tokens,
        step_s=step_s,
        flops_per_s=compute.flops_per_s,
    )
    time = pace.run_time(
        config.train, val_tokens=val_tokens, checkpoint_bytes=config.checkpoint_bytes(spec)
    )
    sync = "sync      nothing to exchange on one rank"
    if speed is not None:
        megabytes = gradient_bytes(spec, config.distributed) / 1e6
        sync = (
            f"sync      {step.exchange_s:.2f} s a step: {megabytes:.0f} MB of gradients at "
            f"{speed / 1e9:.2f} GB/s; {step.exchange_s - step.exposed_s:.2f} s of this overlap the "
            "backward pass"
        )
    lines = [
        sync,
        f"predicted {step_s:.2f} s a step, of which {compute.seconds:.2f} s are compute at "
        f"{compute.mfu:.0%} of the peak: about {time.words()}",
    ]
    return lines, step_s
