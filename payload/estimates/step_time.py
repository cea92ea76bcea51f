"""Predicts the time of a step on any number of ranks and any network.

`plan`, `preflight`, the trainer's start and `benchmarks.scaling` all use this prediction;
docs/explanations/scaling.md describes its terms, its fit to measurements and its errors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from payload.config.run_config import RunConfig
from payload.estimates.compute_time import BACKWARD_SHARE, ComputeTime, compute_time
from payload.estimates.gradient_buckets import buckets, bytes_per_gradient, gradient_bytes
from payload.estimates.network import (
    LOCAL_LINK,
    PLANNED_COPIES,
    Network,
    ShardTimes,
    sends_per_byte,
)
from payload.estimates.sent_bytes import SentBytes, gathered_bytes, sent_bytes
from payload.machines.rank_mesh import Mesh
from payload.machines.speed_cache import RankSpeed
from payload.models.spec import ModelSpec
from payload.models.stages import largest_stage, slowest_share
from payload.optimizers.adamw import UPDATE_S_PER_WEIGHT
from payload.optimizers.registry import find as find_optimizer

_MOST_COPYING_CORES = 16
"""Number of cores beyond which a rank's copies are assumed to become no faster; more cores were not
measured. At AdamW's rate, 16 cores move 190 GB/s, about a socket's memory bandwidth: eight channels
of DDR5-4800 have 307 GB/s by specification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The parts of a step's time, in seconds."""

    compute_s: float
    """Time of the forward and backward passes without exchange. Includes the update if `update_s`
    is 0."""
    exchange_s: float
    """Time of the all-reduces of all buckets, one after the other."""
    exposed_s: float
    """The part of the exchange after the backward pass. The step waits for this part."""
    busy_s: float
    """Compute time that is lost because the exchange runs at the same time."""
    update_s: float = 0.0
    """Time of the optimizer's update of the rank's weights, if counted separately."""
    copies_s: float = 0.0
    """Time of a sharded rank's copies of weights and gradients around each collective."""

    def total_s(self) -> float:
        """Return the time of the step."""
        return self.compute_s + self.exposed_s + self.busy_s + self.update_s + self.copies_s

    def efficiency(self) -> float:
        """Return the weak-scaling efficiency: the compute time divided by the step time."""
        return self.compute_s / self.total_s()


def step_time(
    spec: ModelSpec,
    *,
    compute_s: float,
    accumulation: int,
    bytes_per_number: int,
    network: Network,
    tokens: int | None = None,
) -> StepTime:
    """Return the step time of a rank with `accumulation` micro-batches and `compute_s` of
    computation.

    Ranks exchange during the last micro-batch's backward pass. A bucket's all-reduce begins when
    the bucket is full and the previous all-reduce is done; after the backward pass, the step waits
    for the remaining all-reduces. `tokens` is the number of tokens in a micro-batch of all ranks;
    see `buckets`.
    """
    if network.ranks == 1:
        return StepTime(compute_s=compute_s, exchange_s=0.0, exposed_s=0.0, busy_s=0.0)
    backward_s = compute_s / accumulation * BACKWARD_SHARE
    done_s = exchange_s = 0.0
    exchanged = buckets(spec, tokens=tokens)
    for bucket in exchanged:
        took_s = network.all_reduce_s(bucket.elements * bytes_per_number)
        exchange_s += took_s
        done_s = max(done_s, bucket.ready * backward_s) + took_s
    exposed_s = max(0.0, done_s - backward_s)
    numbers = sum(bucket.elements for bucket in exchanged)
    sent = sends_per_byte(network.ranks) * numbers * bytes_per_number
    busy_s = network.busy_s_per_byte * sent * (1 - exposed_s / exchange_s)
    if bytes_per_number < 4:
        busy_s += network.convert_s_per_number * numbers
    return StepTime(compute_s=compute_s, exchange_s=exchange_s, exposed_s=exposed_s, busy_s=busy_s)


def _waiting_step_time(
    config: RunConfig,
    spec: ModelSpec,
    *,
    compute_s: float,
    network: Network,
    threads: int,
    speed: RankSpeed | None,
) -> StepTime:
    """Return the step time of ranks that run collectives one after the other, without overlap.

    Tensor ranks are on the same node and send through memory.
    """
    sent = sent_bytes(config, spec, ranks=network.ranks)
    within_node = max(network.bytes_per_s, LOCAL_LINK.bytes_per_s)
    exchange_s = sent.replicate / network.bytes_per_s
    exchange_s += _shard_exchange_s(config, spec, sent=sent, network=network)
    exchange_s += sent.tensor / within_node + sent.pipeline / network.bytes_per_s
    mesh, on_gpu = config.distributed.mesh(network.ranks), config.device.kind == "cuda"
    compute_s *= _share_of_computing(config, spec, mesh)
    return StepTime(
        compute_s=compute_s,
        exchange_s=exchange_s,
        exposed_s=exchange_s,
        busy_s=0.0,
        update_s=update_s(
            config,
            spec,
            mesh,
            threads=threads,
            on_gpu=on_gpu,
            speed=speed,
        ),
        copies_s=_copies_s(config, spec, mesh=mesh, measured=network.shards, threads=threads),
    )


def _shard_exchange_s(
    config: RunConfig, spec: ModelSpec, *, sent: SentBytes, network: Network
) -> float:
    """Return the seconds of a rank's shard exchange, from measurements or the network's rate."""
    mesh = config.distributed.mesh(network.ranks)
    if mesh.shard == 1 or network.shards is None:
        return sent.shard / network.bytes_per_s
    passes = max(1, config.batch.global_batch_size // config.batch.per_pass(mesh.data_ranks))
    others = (mesh.shard - 1) / mesh.shard
    gathers = passes * others * gathered_bytes(config, spec, mesh=mesh)
    sums = sent.shard - gathers
    return gathers / network.shards.gather_bytes_per_s + sums / network.shards.sum_bytes_per_s


def _copies_s(
    config: RunConfig, spec: ModelSpec, *, mesh: Mesh, measured: ShardTimes | None, threads: int
) -> float:
    """Return the seconds per step in which a sharded rank copies; 0 for an unsharded rank."""
    # On a GPU, the allocator keeps memory, and copies overlap with the computation.
    if mesh.shard == 1 or (measured is None and config.device.kind == "cuda"):
        return 0.0
    passes = max(1, config.batch.global_batch_size // config.batch.per_pass(mesh.data_ranks))
    held = largest_stage(spec, mesh.pipeline) / mesh.tensor
    gradients = gradient_bytes(spec, config.distributed) * held
    each = measured.copies if measured else PLANNED_COPIES
    seconds = passes * (
        each.gathered_s_per_byte * gathered_bytes(config, spec, mesh=mesh)
        + each.summed_s_per_byte * gradients
    )
    return seconds if measured else seconds / min(threads, _MOST_COPYING_CORES)


def update_s(
    config: RunConfig,
    spec: ModelSpec,
    mesh: Mesh,
    *,
    threads: int = 1,
    on_gpu: bool = False,
    speed: RankSpeed | None = None,
) -> float:
    """Return the seconds of the update on the rank with the most weights.

    Without a measured `speed`, the speed of the development machine is assumed.
    """
    held = largest_stage(spec, mesh.pipeline) / (mesh.tensor * mesh.shard)
    optimizer = find_optimizer(config.optimizer.name)
    if on_gpu:
        return optimizer.gpu_update_s * spec.num_trainable_params() * held
    if speed is not None:
        # The measurement includes the limit of the memory bandwidth.
        share = optimizer.update_s / UPDATE_S_PER_WEIGHT
        return share * speed.update_core_s * spec.num_trainable_params() * held / threads
    seconds = optimizer.update_s * spec.num_trainable_params() * held
    return seconds / min(threads, _MOST_COPYING_CORES)


def _share_of_computing(config: RunConfig, spec: ModelSpec, mesh: Mesh) -> float:
    """Return the slowest rank's compute time, including waits, relative to an even share.

    Tensor ranks run the output head without kernels. A pipeline is as fast as its slowest stage,
    and each stage waits while the pipeline fills and empties.
    """
    found = 1.0
    if mesh.tensor > 1 and config.uses_kernels():
        head = 6 * spec.head_rows() * spec.width() / spec.flops_per_token()
        # The head's kernels also support fp32, but their share of the MFU was measured only in
        # bf16.
        config = config.computing_in("bf16")
        plain = replace(config, engine=replace(config.engine, kernels="off"))
        found += head * (config.typical_mfu(spec) / plain.typical_mfu(spec) - 1)
    if mesh.pipeline > 1:
        per_pass = config.batch.per_pass(mesh.data_ranks)
        passes = max(1, config.batch.global_batch_size // per_pass)
        slowest = slowest_share(spec, mesh.pipeline) * mesh.pipeline
        found *= slowest * (passes + mesh.pipeline - 1) / passes
    return found


def run_step_time(
    config: RunConfig,
    spec: ModelSpec,
    *,
    compute_s: float,
    network: Network,
    threads: int = 1,
    speed: RankSpeed | None = None,
) -> StepTime:
    """Return the step time of the run `config`.

    `compute_s` is the time of forward and backward passes.

    The result includes the optimizer's update on `threads` threads of each rank, as in `update_s`.
    device.kind = "auto" is treated as CPUs: a plan for GPUs sets "cuda"
    (`payload.orchestrate.hardware.nvidia.for_prediction`).
    """
    on_gpu = config.device.kind == "cuda"
    if config.distributed.shards(network.ranks) > 1 or config.distributed.splits_model():
        return _waiting_step_time(
            config,
            spec,
            compute_s=compute_s,
            network=network,
            threads=threads,
            speed=speed,
        )
    per_pass = config.batch.per_pass(network.ranks)
    # The prediction may be for a rank count that does not divide the batch, as in preflight;
    # `grad_accum_steps` checks this.
    found = step_time(
        spec,
        compute_s=compute_s,
        accumulation=max(1, config.batch.global_batch_size // per_pass),
        bytes_per_number=bytes_per_gradient(config.distributed),
        network=network,
        tokens=per_pass * config.data.sequence_length
        if config.engine.wants_kernels() and not on_gpu
        else None,
    )
    mesh = config.distributed.mesh(network.ranks)
    seconds = update_s(
        config,
        spec,
        mesh,
        threads=threads,
        on_gpu=on_gpu,
        speed=speed,
    )
    return replace(found, update_s=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """The prediction of a step."""

    compute: ComputeTime
    """The step's compute time, as if the ranks shared it evenly."""
    parts: StepTime


def predict_step(
    config: RunConfig,
    spec: ModelSpec,
    *,
    peak_flops_per_s: float,
    network: Network,
    threads: int,
    tokens: int | None = None,
    speed: RankSpeed | None = None,
) -> PredictedStep:
    """Predict a step of the run `config` on ranks with `threads` threads each.

    `peak_flops_per_s` is the GEMM peak of all ranks together, and `tokens` the number of tokens in
    a step (None = all sequences are full). `speed` is the measured speed of a
    rank, or None.
    """
    compute = compute_time(
        config,
        spec,
        peak_flops_per_s=peak_flops_per_s,
        cores=network.ranks * threads,
        tokens=tokens,
        layers=None if speed is None else speed.layers,
    )
    parts = run_step_time(
        config,
        spec,
        compute_s=compute.seconds,
        network=network,
        threads=threads,
        speed=speed,
    )
    return PredictedStep(compute=compute, parts=parts)
