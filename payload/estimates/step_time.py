"""How long a step takes, on how many ranks and over which network: the one model. Pure arithmetic.

`plan`, `preflight`, the trainer's start and `benchmarks.scaling` all ask it; docs/scaling.md has
its terms, its fit to measurements and its errors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from payload.config.launch_sections import DistributedSection
from payload.config.run_config import RunConfig
from payload.machines.rank_mesh import Mesh
from payload.models.spec import BYTES_PER_WEIGHT, ModelSpec
from payload.models.stages import largest_stage, outer_weights, slowest_share, stage_weights
from payload.optimizers.registry import find as find_optimizer

# gloo's all-reduce of 32 MB of fp32 between two ranks over loopback: gradient bytes over time, on
# two busy cores of the development machine; torchft PR #199 has 15-19 Gbit/s for 4-40 MB.
LOOPBACK_BYTES_PER_S = 1.5e9

_MOST_COPYING_CORES = 16
"""So many cores move 190 GB/s at AdamW's rate, about what a socket's memory gives: eight channels
of DDR5-4800 have 307 GB/s by specification. More cores are not counted; no such rank was
measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTimes:
    """Times of a sharded rank's copies beside its collectives, page faults included.

    Source of what is copied: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """

    gathered_s_per_byte: float
    """Time for a gathered weight: its own part into the collective's buffer, and all of that into
    the weight, whose memory is new each time."""
    summed_s_per_byte: float
    """Time for a gradient: its memory, which is new each time, the copy into the collective's
    buffer, and the mean and the accumulation of the rank's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTimes:
    """Speeds that sharded ranks measure before they train: of collectives, and of copies."""

    gather_bytes_per_s: float
    """Rate at which a rank sends in an all-gather, to all others together."""
    sum_bytes_per_s: float
    """Rate at which a rank sends in a reduce-scatter."""
    copies: CopyTimes


PLANNED_COPIES = CopyTimes(gathered_s_per_byte=0.3e-9, summed_s_per_byte=0.4e-9)
"""One core's, where no trainer has measured them (`measure_shards`): a layer of GPT-2 124M on each
of two busy cores of the development machine."""

BACKWARD_SHARE = 2 / 3
"""Share of a pass: for every product of the forward pass, the backward pass has two."""

FIRST_BUCKET_BYTES = 2**20
"""Gradients in fp32; small, so that the exchange begins early. Both are torch's DDP's sizes."""
BUCKET_BYTES = 25 * 2**20
"""A bucket is closed with the parameter that takes it there."""

# Of n tokens of Python source, in blocks from anywhere, 1.2 n^0.7 were distinct, within a quarter
# up to a quarter of a million. Prose has more words than code, so three times that is taken.
_DISTINCT = 3.6
_DISTINCT_EXPONENT = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network over which ranks exchange gradients, in a ring."""

    ranks: int
    bytes_per_s: float
    """Rate of sending while a rank receives as much, on the slowest link: all wait for it."""
    latency_s: float = 0.0
    """Latency of one of a ring's rounds. 0 where `bytes_per_s` was measured on all-reduces of
    about a bucket's size, since it is part of it then."""
    busy_s_per_byte: float = 0.0
    """Computing time that a rank loses for each byte that it sends."""
    convert_s_per_number: float = 0.0
    """Computing time that a rank loses for each gradient that travels as bf16."""
    shards: ShardTimes | None = None
    """As sharded ranks measured them; None = not measured."""

    def all_reduce_s(self, num_bytes: float) -> float:
        """Time until all ranks have the sum of `num_bytes` of each."""
        rounds = 2 * (self.ranks - 1)
        return rounds * self.latency_s + sends_per_byte(self.ranks) * num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are exchanged together."""

    numbers: int
    ready: float
    """Share of the backward pass after which they are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step's parts, in seconds."""

    compute_s: float
    """Time of the passes of a rank that exchanges nothing, and the update where `update_s` is 0."""
    exchange_s: float
    """All buckets' all-reduces, one after the other."""
    exposed_s: float
    """The part of it after the backward pass: the step waits for it."""
    busy_s: float
    """Computing that the exchange delays while it is hidden."""
    update_s: float = 0.0
    """The optimizer's update of what the rank holds, where it is counted apart."""
    copies_s: float = 0.0
    """A sharded rank's copies of weights and gradients, before and after each collective."""

    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.exposed_s + self.busy_s + self.update_s + self.copies_s

    def efficiency(self) -> float:
        """Return weak scaling's efficiency: a step without the others over one with them."""
        return self.compute_s / self.total_s()


def sends_per_byte(ranks: int) -> float:
    """How often a ring all-reduce sends each byte of the gradients: 2 (N-1)/N times."""
    return 2 * (ranks - 1) / ranks


def gradient_bytes(spec: ModelSpec, settings: DistributedSection) -> int:
    """Bytes that each rank gives into the exchange in a step."""
    return spec.num_trainable_params() * bytes_per_gradient(settings)


def bytes_per_gradient(settings: DistributedSection) -> int:
    """Bytes of one element, as it travels."""
    return 2 if settings.grad_dtype == "bf16" else 4


def buckets(spec: ModelSpec, *, tokens: int | None = None) -> tuple[Bucket, ...]:
    """The exchange's buckets, in the order in which the backward pass fills them.

    Where the token embedding is the output head too, its gradient is the first to begin and the
    last to be whole. With the kernels it travels in two parts, the head's first of all, and at the
    end the rows of those `tokens` that all ranks read in a pass; without (None) in the last bucket.
    """
    sizes = spec.gradient_sizes()
    in_parts = tokens is not None and spec.is_tied()
    head = 6 * spec.embedding_size() / spec.flops_per_token()
    all_matrices = sum(each.elements for each in sizes if each.kind == "matrix")
    found: list[Bucket] = []
    if in_parts:
        found.append(Bucket(numbers=spec.embedding_size(), ready=head))
    is_first, held, matrices = True, 0, 0
    for each in sizes:
        if each.kind == "embedding":
            continue
        held += each.elements
        matrices += each.elements * (each.kind == "matrix")
        limit = FIRST_BUCKET_BYTES if is_first else BUCKET_BYTES
        if held * 4 >= limit:
            ready = head + (1 - head) * matrices / max(all_matrices, 1)
            found.append(Bucket(numbers=held, ready=ready))
            is_first, held = False, 0
    held += sum(each.elements for each in sizes if each.kind == "embedding")
    if in_parts:
        held -= spec.embedding_size()
    if held:
        found.append(Bucket(numbers=held, ready=1.0))
    if in_parts and tokens is not None:
        rows = min(spec.vocab_size, round(_DISTINCT * tokens**_DISTINCT_EXPONENT))
        found.append(Bucket(numbers=rows * spec.width(), ready=1.0))
    return tuple(found)


def step_time(
    spec: ModelSpec,
    *,
    compute_s: float,
    accumulation: int,
    bytes_per_number: int,
    network: Network,
    tokens: int | None = None,
) -> StepTime:
    """The step of a rank that computes for `compute_s` in `accumulation` passes.

    Ranks exchange during the last pass's backward. A bucket's all-reduce begins when it is full and
    the one before is done; what is not done when the backward pass ends is waited for. `tokens`
    are those of a pass on all ranks, as `buckets` has it.
    """
    if network.ranks == 1:
        return StepTime(compute_s=compute_s, exchange_s=0.0, exposed_s=0.0, busy_s=0.0)
    backward_s = compute_s / accumulation * BACKWARD_SHARE
    done_s = exchange_s = 0.0
    exchanged = buckets(spec, tokens=tokens)
    for bucket in exchanged:
        took_s = network.all_reduce_s(bucket.numbers * bytes_per_number)
        exchange_s += took_s
        done_s = max(done_s, bucket.ready * backward_s) + took_s
    exposed_s = max(0.0, done_s - backward_s)
    numbers = sum(bucket.numbers for bucket in exchanged)
    sent = sends_per_byte(network.ranks) * numbers * bytes_per_number
    busy_s = network.busy_s_per_byte * sent * (1 - exposed_s / exchange_s)
    if bytes_per_number < 4:
        busy_s += network.convert_s_per_number * numbers
    return StepTime(compute_s=compute_s, exchange_s=exchange_s, exposed_s=exposed_s, busy_s=busy_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes that a rank sends in a step, over each dimension of the mesh."""

    replicate: float
    """To the ranks that hold the same part of the model, or all of it like this one."""
    shard: float
    """To the ranks that hold the other parts."""
    tensor: float = 0.0
    """To the ranks that compute each layer with it."""
    pipeline: float = 0.0
    """To the stages beside it."""

    def total(self) -> float:
        """Return the bytes over all dimensions."""
        return self.replicate + self.shard + self.tensor + self.pipeline


def sent_bytes(config: RunConfig, spec: ModelSpec, *, ranks: int) -> Sent:
    """Return what each of `ranks` ranks sends in a step.

    Replicas all-reduce gradients, once a step. Shards gather what belongs to no layer once a pass
    and the layers twice, and reduce-scatter gradients in every pass; replicas of shards all-reduce
    their part then. Tensor ranks add up what each of them makes of the tokens. DeepSpeed gathers
    all weights twice, and gloo's reduce-scatter, which it takes, is an all-reduce.
    """
    mesh = config.distributed.mesh(ranks)
    gradients = gradient_bytes(spec, config.distributed)
    per_pass = config.batch.per_pass(mesh.data_ranks)
    passes = max(1, config.batch.global_batch_size // per_pass)
    held = largest_stage(spec, mesh.pipeline) / mesh.tensor
    sums = passes * sends_per_byte(mesh.tensor) * _summed_bytes(config, spec) / mesh.pipeline
    sent = Sent(
        replicate=sends_per_byte(mesh.replicate) * gradients * held,
        shard=0.0,
        tensor=sums,
        pipeline=_passed_bytes(config, spec, passes=passes),
    )
    if mesh.shard == 1:
        return sent
    others = (mesh.shard - 1) / mesh.shard
    gathered = _gathered_bytes(config, spec, mesh=mesh)
    if config.distributed.strategy == "zero3":
        return replace(sent, replicate=0.0, shard=passes * others * (gathered + 2 * gradients))
    return replace(
        sent,
        replicate=passes * sent.replicate / mesh.shard,
        shard=passes * others * (gathered + gradients * held),
    )


def _gathered_bytes(config: RunConfig, spec: ModelSpec, *, mesh: Mesh) -> float:
    """Return the bytes of weights that shards of the largest stage gather in a pass.

    Those of layers are gathered twice, and what belongs to no layer once; DeepSpeed gathers all of
    them twice.
    """
    setting = config.rank_setting(dtype=config.dtype(), world_size=mesh.world_size)
    weights = spec.weight_bytes(setting)
    if config.distributed.strategy == "zero3":
        return 2.0 * weights
    each = zip(stage_weights(spec, mesh.pipeline), outer_weights(spec, mesh.pipeline), strict=True)
    twice = weights / spec.num_params()
    return (
        max(
            outer * BYTES_PER_WEIGHT + 2 * max(0.0, held * twice - outer * BYTES_PER_WEIGHT)
            for held, outer in each
        )
        / mesh.tensor
    )


def _summed_bytes(config: RunConfig, spec: ModelSpec) -> float:
    """Return the bytes that tensor ranks add up in a pass.

    They are those of the results of each layer's attention and MLP and of their gradients, in the
    dtype of the matmuls; of the embedding's result and the head's gradient, in fp32; and, with
    activation checkpointing, of the results once more.
    """
    numbers = config.batch.sequences() * config.data.sequence_length * spec.width()
    size = 4 if config.dtype() == "fp32" else 2
    sums = 6 if config.memory.activation_checkpointing == "on" else 4
    return float(numbers * (spec.num_layers() * sums * size + 2 * BYTES_PER_WEIGHT))


def _passed_bytes(config: RunConfig, spec: ModelSpec, *, passes: int) -> float:
    """Return the bytes that the busiest stage sends to those beside it in a step.

    The first and the last send a pass's activations or their gradients, those between send both.
    Where the head is the embedding, its gradient goes between the first and the last, too.
    """
    stages = config.distributed.pipeline_parallel
    if stages == 1:
        return 0.0
    numbers = config.batch.sequences() * config.data.sequence_length * spec.width()
    tied = spec.embedding_size() / config.distributed.tensor_parallel if spec.is_tied() else 0
    return BYTES_PER_WEIGHT * float(passes * numbers * min(2, stages - 1) + tied)


def _waiting_step_time(
    config: RunConfig, spec: ModelSpec, *, compute_s: float, network: Network, threads: int
) -> StepTime:
    """Return the step time of ranks that wait for their collectives, one after the other.

    Tensor ranks share a node, where memory carries what they send.
    """
    sent = sent_bytes(config, spec, ranks=network.ranks)
    within_node = max(network.bytes_per_s, LOOPBACK_BYTES_PER_S)
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
        update_s=update_s(config, spec, mesh, threads=threads, on_gpu=on_gpu),
        copies_s=_copies_s(config, spec, mesh=mesh, measured=network.shards, threads=threads),
    )


def _shard_exchange_s(config: RunConfig, spec: ModelSpec, *, sent: Sent, network: Network) -> float:
    """Return the seconds in which a rank's shards travel: as measured, or at the network's rate."""
    mesh = config.distributed.mesh(network.ranks)
    if mesh.shard == 1 or network.shards is None:
        return sent.shard / network.bytes_per_s
    passes = max(1, config.batch.global_batch_size // config.batch.per_pass(mesh.data_ranks))
    others = (mesh.shard - 1) / mesh.shard
    gathers = passes * others * _gathered_bytes(config, spec, mesh=mesh)
    sums = sent.shard - gathers
    return gathers / network.shards.gather_bytes_per_s + sums / network.shards.sum_bytes_per_s


def _copies_s(
    config: RunConfig, spec: ModelSpec, *, mesh: Mesh, measured: ShardTimes | None, threads: int
) -> float:
    """Return the seconds of a step in which a sharded rank copies; else 0."""
    # A GPU's allocator keeps its memory, and its copies run beside the computation.
    if mesh.shard == 1 or (measured is None and config.device.kind == "cuda"):
        return 0.0
    passes = max(1, config.batch.global_batch_size // config.batch.per_pass(mesh.data_ranks))
    held = largest_stage(spec, mesh.pipeline) / mesh.tensor
    gradients = gradient_bytes(spec, config.distributed) * held
    each = measured.copies if measured else PLANNED_COPIES
    seconds = passes * (
        each.gathered_s_per_byte * _gathered_bytes(config, spec, mesh=mesh)
        + each.summed_s_per_byte * gradients
    )
    return seconds if measured else seconds / min(threads, _MOST_COPYING_CORES)


def update_s(
    config: RunConfig, spec: ModelSpec, mesh: Mesh, *, threads: int = 1, on_gpu: bool = False
) -> float:
    """Return how long the rank with the most weights updates them, on a GPU or with `threads`."""
    held = largest_stage(spec, mesh.pipeline) / (mesh.tensor * mesh.shard)
    optimizer = find_optimizer(config.optimizer.name)
    if on_gpu:
        return optimizer.gpu_update_s * spec.num_trainable_params() * held
    seconds = optimizer.update_s * spec.num_trainable_params() * held
    return seconds / min(threads, _MOST_COPYING_CORES)


def _share_of_computing(config: RunConfig, spec: ModelSpec, mesh: Mesh) -> float:
    """Return the computing of the slowest rank, waits for others included, over an even share.

    Tensor ranks run the head without kernels. The slowest stage sets the pace of a pipeline, and
    each waits for it to fill and to empty.
    """
    found = 1.0
    if mesh.tensor > 1 and config.uses_kernels() and config.device.kind != "cuda":
        head = 6 * spec.head_rows() * spec.width() / spec.flops_per_token()
        # The head's kernels are for fp32 as well, but no share of them alone was measured.
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
    config: RunConfig, spec: ModelSpec, *, compute_s: float, network: Network, threads: int = 1
) -> StepTime:
    """Return the time of a step of the run `config`, whose passes take `compute_s` on these ranks.

    The update is none of it; each rank makes it with `threads`. With device.kind = "auto" they are
    CPUs: a plan for GPUs says "cuda" (`payload.orchestrate.hardware.nvidia.for_prediction`).
    """
    on_gpu = config.device.kind == "cuda"
    if config.distributed.shards(network.ranks) > 1 or config.distributed.splits_model():
        return _waiting_step_time(
            config, spec, compute_s=compute_s, network=network, threads=threads
        )
    per_pass = config.batch.per_pass(network.ranks)
    # A prediction, also for ranks that are not the run's: preflight's on this machine, or with the
    # defaults. Whether a batch divides is `grad_accum_steps`'s to say.
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
    seconds = update_s(config, spec, mesh, threads=threads, on_gpu=on_gpu)
    return replace(found, update_s=seconds)
