"""Computes the bytes that a rank sends in a step, over each dimension of the mesh of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from payload.config.run_config import RunConfig
from payload.estimates.gradient_buckets import gradient_bytes
from payload.estimates.network import sends_per_byte
from payload.machines.rank_mesh import Mesh
from payload.models.spec import BYTES_PER_WEIGHT, ModelSpec
from payload.models.stages import largest_stage, outer_weights, stage_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBytes:
    """The bytes that a rank sends in a step, over each dimension of the mesh."""

    replicate: float
    """Bytes sent to the ranks with the same weights as this rank: the full model, or the same part
    of the model."""
    shard: float
    """Bytes sent to the ranks that hold the other shards."""
    tensor: float = 0.0
    """Bytes sent to the ranks that compute each layer together with this rank."""
    pipeline: float = 0.0
    """Bytes sent to the adjacent stages."""

    def total(self) -> float:
        """Return the bytes over all dimensions."""
        return self.replicate + self.shard + self.tensor + self.pipeline


def sent_bytes(config: RunConfig, spec: ModelSpec, *, ranks: int) -> SentBytes:
    """Return the bytes that each of `ranks` ranks sends in a step.

    Replicas all-reduce gradients once per step. In every micro-batch, sharded ranks gather the
    weights outside the layers once and the layers twice, and reduce-scatter gradients. Replicas of
    a shard then all-reduce the shard's gradients. Tensor ranks sum their partial results. DeepSpeed
    gathers all weights twice, and its reduce-scatter over gloo is an all-reduce.
    """
    mesh = config.distributed.mesh(ranks)
    gradients = gradient_bytes(spec, config.distributed)
    per_pass = config.batch.per_pass(mesh.data_ranks)
    passes = max(1, config.batch.global_batch_size // per_pass)
    held = largest_stage(spec, mesh.pipeline) / mesh.tensor
    sums = passes * sends_per_byte(mesh.tensor) * _summed_bytes(config, spec) / mesh.pipeline
    sent = SentBytes(
        replicate=sends_per_byte(mesh.replicate) * gradients * held,
        shard=0.0,
        tensor=sums,
        pipeline=_passed_bytes(config, spec, passes=passes),
    )
    if mesh.shard == 1:
        return sent
    others = (mesh.shard - 1) / mesh.shard
    gathered = gathered_bytes(config, spec, mesh=mesh)
    if config.distributed.strategy == "zero3":
        return replace(sent, replicate=0.0, shard=passes * others * (gathered + 2 * gradients))
    return replace(
        sent,
        replicate=passes * sent.replicate / mesh.shard,
        shard=passes * others * (gathered + gradients * held),
    )


def gathered_bytes(config: RunConfig, spec: ModelSpec, *, mesh: Mesh) -> float:
    """Return the bytes of weights that sharded ranks of the largest stage gather in a micro-batch.

    Layers are gathered twice, and weights outside the layers once; DeepSpeed gathers all weights
    twice.
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
    """Return the bytes that tensor ranks sum in a micro-batch.

    The outputs of each layer's attention and MLP, and the gradients of these outputs, are summed in
    the dtype of the matmuls. With activation checkpointing, the outputs are summed twice. The
    output of the embedding and the gradient of the head are summed in fp32.
    """
    numbers = config.batch.micro_batch() * config.data.sequence_length * spec.width()
    size = 4 if config.dtype() == "fp32" else 2
    sums = 6 if config.memory.activation_checkpointing == "on" else 4
    return float(numbers * (spec.num_layers() * sums * size + 2 * BYTES_PER_WEIGHT))


def _passed_bytes(config: RunConfig, spec: ModelSpec, *, passes: int) -> float:
    """Return the bytes that the busiest stage sends to its neighbours in a step.

    The first and the last stage send activations or gradients of each micro-batch, all other stages
    send both. If the output head is the token embedding, the first and the last stage also exchange
    this weight's gradient.
    """
    stages = config.distributed.pipeline_parallel
    if stages == 1:
        return 0.0
    numbers = config.batch.micro_batch() * config.data.sequence_length * spec.width()
    tied = spec.embedding_size() / config.distributed.tensor_parallel if spec.is_tied() else 0
    return BYTES_PER_WEIGHT * float(passes * numbers * min(2, stages - 1) + tied)
