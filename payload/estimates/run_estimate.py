"""Estimates a run: sizes, memory, and the cost of exchanging gradients."""

from __future__ import annotations

from dataclasses import dataclass

from payload.config.model_checks import require_split
from payload.config.run_config import RunConfig
from payload.estimates.compute_time import step_flops
from payload.estimates.gradient_buckets import gradient_bytes
from payload.estimates.network import Link
from payload.estimates.sent_bytes import sent_bytes
from payload.estimates.step_time import predict_step, run_step_time
from payload.machines.speed_cache import RankSpeed
from payload.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """The estimated sizes, memory and times of a run."""

    params: int
    checkpoint_bytes: int
    """Bytes of one checkpoint on disk, without the small files."""
    flops_per_step: int
    tokens_per_step: int
    tokens_total: int
    grad_accum_steps: int
    micro_batch_size: int
    """Sequences in a rank's micro-batch."""
    memory_bytes_per_rank: int
    """Estimated peak memory of a rank."""
    grad_bytes: int
    """Bytes of gradients that each rank has to exchange per step."""
    replicas: int
    """First dimension of the mesh: number of groups of ranks; each group has a whole model."""
    shards: int
    """Second dimension of the mesh: number of ranks that shard one model."""
    replicate_bytes: int
    """Bytes that each rank sends per step over the first dimension."""
    shard_bytes: int
    """Bytes that each rank sends per step over the second dimension."""
    tensor: int = 1
    """Number of ranks that together compute each layer."""
    tensor_bytes: int = 0
    """Bytes that each rank sends per step to the other tensor ranks."""
    pipeline: int = 1
    """Number of pipeline stages, each with some of the layers."""
    pipeline_bytes: int = 0
    """Bytes that a rank sends per step to the adjacent stages."""
    sync_s: float
    """Predicted time of a step's gradient exchange without overlap."""
    compute_s: float | None = None
    """Predicted time of a step's forward and backward passes at the MFU `mfu`; None if the peak was
    not measured."""
    mfu: float | None = None
    """The MFU that `compute_s` assumes: a fraction of the peak FLOP/s; None without a
    measurement."""
    step_s: float | None = None
    """Predicted time of a step, with the update and the part of the exchange that does not overlap;
    None without a measurement."""


def estimate_run(
    config: RunConfig,
    *,
    spec: ModelSpec,
    world_size: int,
    link: Link,
    peak_flops_per_s: float | None = None,
    threads: int = 1,
    speed: RankSpeed | None = None,
    tokens: int | None = None,
) -> RunEstimate:
    """Estimate the run `config` of a model with this spec on `world_size` ranks.

    `link` is the connection between ranks; `peak_flops_per_s` is the sum over ranks; `threads` is
    the number of threads of each rank; `speed` is the measured speed of a rank; `tokens` is the
    number of tokens in a step (None = all sequences are full).

    Raises ConfigError if the batch or the model cannot be divided over the ranks.
    """
    tokens = tokens or config.tokens_per_step()
    require_split(spec, config)
    accumulation = config.passes(world_size)
    grad_bytes = gradient_bytes(spec, config.distributed)
    network = link.network(world_size)
    predicted = None
    if peak_flops_per_s:
        predicted = predict_step(
            config,
            spec,
            peak_flops_per_s=peak_flops_per_s,
            network=network,
            threads=threads,
            speed=speed,
            tokens=tokens,
        )
    step = (
        run_step_time(config, spec, compute_s=0.0, network=network, threads=threads)
        if predicted is None
        else predicted.parts
    )
    sent = sent_bytes(config, spec, ranks=world_size)
    mesh = config.distributed.mesh(world_size)
    is_hidden = mesh.shard == 1 and not mesh.splits_model()
    return RunEstimate(
        params=spec.num_params(),
        checkpoint_bytes=config.checkpoint_bytes(spec),
        flops_per_step=step_flops(config, spec, tokens=tokens),
        tokens_per_step=tokens,
        tokens_total=tokens * config.train.steps,
        grad_accum_steps=accumulation,
        micro_batch_size=config.batch.micro_batch(),
        memory_bytes_per_rank=config.memory_bytes(
            spec,
            dtype=config.dtype(),
            world_size=world_size,
        ),
        grad_bytes=grad_bytes,
        replicas=mesh.replicate,
        shards=mesh.shard,
        replicate_bytes=round(sent.replicate),
        shard_bytes=round(sent.shard),
        tensor=mesh.tensor,
        tensor_bytes=round(sent.tensor),
        pipeline=mesh.pipeline,
        pipeline_bytes=round(sent.pipeline),
        sync_s=network.all_reduce_s(grad_bytes) if is_hidden else step.exchange_s,
        compute_s=None if predicted is None else predicted.compute.seconds,
        mfu=None if predicted is None else predicted.compute.mfu,
        step_s=None if predicted is None else step.total_s(),
    )
