"""What a run is going to cost, said before it starts: sizes, memory, time."""

from __future__ import annotations

from payload.data.blocks import TokenData
from payload.model_shape import TYPICAL_MFU, ModelShape
from payload.run_config import RunConfig
from payload.train.calibration import Calibration
from payload.train.world import World


def describe(
    config: RunConfig,
    *,
    shape: ModelShape,
    data: TokenData,
    world: World,
    calibration: Calibration,
) -> list[str]:
    """Lines for a person, the run's arithmetic from parameters to predicted time."""
    batch, tokens = config.batch, config.tokens_per_step()
    accumulation = batch.grad_accum_steps(world.world_size)
    all_tokens = tokens * config.train.steps
    memory = shape.memory_bytes(
        micro_batch_size=batch.micro_batch_size,
        dtype=calibration.dtype,
        kernels=config.engine.wants_kernels() and not config.model.dropout,
        alone=world.world_size == 1,
    )
    return [
        f"model     {shape.num_params() / 1e6:.1f}M parameters: {shape.n_layer} layers, "
        f"{shape.n_head} heads, width {shape.n_embd}, context {shape.sequence_length}",
        f"data      {data.meta.train_tokens:,} training and {data.meta.val_tokens:,} validation "
        f"tokens from {data.meta.source}",
        f"batch     {batch.global_batch_size} sequences x {config.data.sequence_length} = "
        f"{tokens:,} tokens a step: {world.world_size} rank(s) x {batch.micro_batch_size} "
        f"sequences x {accumulation} pass(es)",
        f"run       {config.train.steps} steps = {all_tokens:,} tokens = "
        f"{all_tokens / data.meta.train_tokens:.2f} epochs",
        f"precision {calibration.dtype} ({calibration.reason}); peak "
        f"{calibration.peak_flops_per_s / 1e12:.2f} TFLOP/s measured over all ranks",
        f"memory    about {memory / 2**30:.1f} GiB a rank",
        *_predictions(config, shape=shape, calibration=calibration),
    ]


def _predictions(config: RunConfig, *, shape: ModelShape, calibration: Calibration) -> list[str]:
    """Time for computing and for synchronisation; what of the two overlaps is not foreseen."""
    step_flops = config.tokens_per_step() * shape.flops_per_token()
    compute_s = step_flops / (calibration.peak_flops_per_s * TYPICAL_MFU)
    speed, sync_s = calibration.all_reduce_bytes_per_s, 0.0
    sync = "sync      nothing to exchange with one rank"
    if speed is not None:
        grad_bytes = shape.num_params() * (2 if config.distributed.grad_dtype == "bf16" else 4)
        sync_s = grad_bytes / speed
        sync = (
            f"sync      {sync_s:.2f} s a step: {grad_bytes / 1e6:.0f} MB of gradients at "
            f"{speed / 1e9:.2f} GB/s, partly hidden behind the backward pass"
        )
    minutes = (compute_s + sync_s) * config.train.steps / 60
    return [
        sync,
        f"predicted {compute_s:.2f} s a step of computing, at {TYPICAL_MFU:.0%} of the peak: "
        f"about {minutes:.1f} min without evaluation",
    ]
