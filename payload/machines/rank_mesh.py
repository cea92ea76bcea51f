"""The mesh of ranks: who holds which part of the model, and who trains on which data.

Its four dimensions are pipeline x replicate x shard x tensor. The last one varies fastest with a
rank's number, so that tensor ranks are neighbours on a node; the first one varies slowest, as
pipeline stages send least. Splitting a tensor over one dimension is arithmetic, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from payload.core.errors import ConfigError

Dimension = Literal["pipeline", "replicate", "shard", "tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank's index in each dimension."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The size of each dimension."""

    replicate: int = 1
    """Ranks that hold the same part of the model and train on other data."""
    shard: int = 1
    """Ranks that hold a part of each weight, and gather it for a pass over other data each."""
    tensor: int = 1
    """Ranks that compute each layer together, on the same data."""
    pipeline: int = 1
    """Groups of ranks that each have some of the layers."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.data_ranks * self.tensor * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Return how many ranks train on data of their own."""
        return self.replicate * self.shard

    def splits_model(self) -> bool:
        """Say whether several ranks make one pass over the same data together."""
        return self.tensor > 1 or self.pipeline > 1

    def place(self, rank: int) -> Place:
        """Return a rank's indices."""
        rank, tensor = divmod(rank, self.tensor)
        rank, shard = divmod(rank, self.shard)
        pipeline, replica = divmod(rank, self.replicate)
        return Place(pipeline=pipeline, replicate=replica, shard=shard, tensor=tensor)

    def rank(self, place: Place) -> int:
        """Return the number of the rank at a place."""
        found = place.pipeline * self.replicate + place.replicate
        return (found * self.shard + place.shard) * self.tensor + place.tensor

    def data_rank(self, rank: int) -> int:
        """Return which of `data_ranks` parts of a batch a rank trains on."""
        place = self.place(rank)
        return place.replicate * self.shard + place.shard

    def along(self, rank: int, *dimensions: Dimension) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` in these dimensions at most, in order."""
        here = self.place(rank)
        others = [name for name in here.__slots__ if name not in dimensions]
        return tuple(
            each
            for each in range(self.world_size)
            if all(getattr(self.place(each), name) == getattr(here, name) for name in others)
        )

    def describe(self) -> str:
        """Return the dimensions in words, those of one rank left out."""
        sizes = {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": self.shard,
            "tensor": self.tensor,
        }
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"

    def compared(self, *, tied: bool) -> str:
        """Return in words what two ranks both hold, which the sync check compares.

        `tied`: the token embedding is the output head, so the first and the last stage have it.
        """
        if self.replicate > 1:
            return "each weight and its optimizer state with its replicas"
        found = ["each weight as the shards gather it"] if self.shard > 1 else []
        if self.tensor > 1:
            found.append("what tensor ranks hold whole (norms, biases added to sums)")
        if self.pipeline > 1 and tied:
            found.append("the embedding with the head on the last stage")
        if not found:
            return "nothing, as no rank holds what another one does; it looks for NaN"
        return f"{' and '.join(found)}; the rest is on one rank alone and checked for NaN"


def make_mesh(
    world_size: int, *, shards: bool, shard_size: int | None, tensor: int, pipeline: int
) -> Mesh:
    """Return the mesh of `world_size` ranks; `shards`: what is left over shares out weights.

    Raises ConfigError when a dimension does not divide what is there.
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
            f"{' or '.join(str(each) for each in divisors(data))}, or leave it out."
        )
    return Mesh(replicate=data // size, shard=size, tensor=tensor, pipeline=pipeline)


def require_tensor_ranks_on_a_node(tensor: int, *, ranks_per_node: int) -> None:
    """Raise ConfigError unless ranks that compute each layer together share a node."""
    if ranks_per_node % tensor:
        raise ConfigError(
            f"distributed.tensor_parallel = {tensor} does not divide the {ranks_per_node} rank(s) "
            "of a node, and tensor ranks have to share one. Set launch.ranks_per_node to a "
            f"multiple of {tensor}, or lower tensor_parallel."
        )


def divisors(number: int) -> list[int]:
    """Return what divides a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def one_of(place: Place, **changed: int) -> Place:
    """Return a place with other indices in some dimensions."""
    return replace(place, **changed)
