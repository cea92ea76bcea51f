"""The device mesh: which part of the model and of the data each rank has.

The mesh has the four dimensions pipeline x replicate x shard x tensor. The tensor dimension varies
fastest with the rank, so that tensor ranks are on the same node. The pipeline dimension varies
slowest, as pipeline stages communicate least.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from payload.core.errors import ConfigError

Dimension = Literal["pipeline", "replicate", "shard", "tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIndices:
    """One rank's index in each dimension."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The size of each dimension."""

    replicate: int = 1
    """Number of ranks that hold the same part of the model and train on different data."""
    shard: int = 1
    """Number of ranks that shard the weights. They gather weights, and train on different data."""
    tensor: int = 1
    """Number of ranks that compute each layer together on the same data."""
    pipeline: int = 1
    """Number of pipeline stages. Each stage is a group of ranks with some of the layers."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.data_ranks * self.tensor * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.replicate * self.shard

    def splits_model(self) -> bool:
        """Return True if tensor or pipeline parallelism splits a model over ranks."""
        return self.tensor > 1 or self.pipeline > 1

    def place(self, rank: int) -> RankIndices:
        """Return a rank's indices."""
        rank, tensor = divmod(rank, self.tensor)
        rank, shard = divmod(rank, self.shard)
        pipeline, replica = divmod(rank, self.replicate)
        return RankIndices(pipeline=pipeline, replicate=replica, shard=shard, tensor=tensor)

    def rank(self, place: RankIndices) -> int:
        """Return the rank at these indices."""
        found = place.pipeline * self.replicate + place.replicate
        return (found * self.shard + place.shard) * self.tensor + place.tensor

    def data_rank(self, rank: int) -> int:
        """Return the index, below `data_ranks`, of the batch part that the rank trains on."""
        place = self.place(rank)
        return place.replicate * self.shard + place.shard

    def along(self, rank: int, *dimensions: Dimension) -> tuple[int, ...]:
        """Return `rank` and all ranks that differ from `rank` only in these dimensions, in
        order."""
        own = self.place(rank)
        others = [name for name in own.__slots__ if name not in dimensions]
        return tuple(
            each
            for each in range(self.world_size)
            if all(getattr(self.place(each), name) == getattr(own, name) for name in others)
        )

    def describe(self) -> str:
        """Return a description of the dimensions larger than 1."""
        sizes = {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": self.shard,
            "tensor": self.tensor,
        }
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"

    def compared(self, *, tied: bool) -> str:
        """Describe the values that the sync check compares: values that several ranks hold.

        `tied` is True if the token embedding is also the output head. Then both the first and the
        last stage hold the embedding.
        """
        if self.replicate > 1:
            return "each weight and its optimizer state with its replicas"
        found = ["each weight as the shards gather it"] if self.shard > 1 else []
        if self.tensor > 1:
            found.append("tensors that all tensor ranks hold (norms, biases added to sums)")
        if self.pipeline > 1 and tied:
            found.append("the embedding with the head on the last stage")
        if not found:
            return (
                "nothing, because no two ranks hold the same values; the check only looks for NaN"
            )
        return f"{' and '.join(found)}; the rest is on one rank only and is checked for NaN"


def make_mesh(
    world_size: int, *, shards: bool, shard_size: int | None, tensor: int, pipeline: int
) -> Mesh:
    """Return the mesh of `world_size` ranks; with `shards`, data-parallel ranks shard weights.

    Raises ConfigError if a dimension does not divide the ranks.
    """
    per_model = tensor * pipeline
    if world_size % per_model:
        raise ConfigError(
            f"distributed.tensor_parallel x pipeline_parallel = {tensor} x {pipeline} = "
            f"{per_model} does not divide the {world_size} ranks. Start a multiple of {per_model} "
            "ranks, or lower one of the two."
        )
    data = world_size // per_model
    if not shards:
        return Mesh(replicate=data, tensor=tensor, pipeline=pipeline)
    size = data if shard_size is None else shard_size
    if data % size:
        ranks = f"{data} ranks"
        if per_model > 1:
            ranks = f"{data} data-parallel ranks ({world_size} / {per_model})"
        raise ConfigError(
            f"distributed.shard_size = {size} does not divide the {ranks}. Use "
            f"{' or '.join(str(each) for each in divisors(data))}, or leave shard_size out."
        )
    return Mesh(replicate=data // size, shard=size, tensor=tensor, pipeline=pipeline)


def require_tensor_ranks_on_a_node(tensor: int, *, ranks_per_node: int) -> None:
    """Raise ConfigError if the ranks of a tensor group would be on several nodes."""
    if ranks_per_node % tensor:
        raise ConfigError(
            f"distributed.tensor_parallel = {tensor} does not divide the {ranks_per_node} rank(s) "
            "of a node, and tensor ranks must share a node. Set launch.ranks_per_node to a "
            f"multiple of {tensor}, or lower tensor_parallel."
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def replace_indices(place: RankIndices, **changed: int) -> RankIndices:
    """Return `place` with changed indices."""
    return replace(place, **changed)
