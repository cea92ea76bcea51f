"""Measures the collectives and memory copies of sharded ranks on one layer before training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from payload.config.launch_sections import DistributedSection
from payload.estimates.network import CopyTimes, ShardTimes
from payload.machines.rank_mesh import Mesh
from payload.models.spec import BYTES_PER_WEIGHT, ModelSpec
from payload.train.ranks.world import World
from payload.train.strategies.groups import group_along
from payload.train.strategies.shard_comms import Buffers, CollectiveTimer, Gather, SumOfParts

_BUDGET_S = 0.3
# A layer of GPT-2 124M, for models whose layer sizes are unknown.
_TYPICAL_BLOCKS = (2304 * 768, 768 * 768, 3072 * 768, 3072 * 768)
# Corresponds to 128 MB of weights; a round needs 4.5 times this memory. Larger copies have the same
# speed.
_MOST_ELEMENTS = 2**25
# A full layer would take minutes at 1 Mbit/s, so only as much is sent as takes about this time.
_SENDING_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSetup:
    """The settings of the measurement: the sharded sizes and the mesh."""

    mesh: Mesh
    by_gloo: bool
    """True with DeepSpeed, which uses gloo's collectives instead of this project's collectives."""
    blocks: tuple[int, ...]
    """Number of elements in each matrix of a layer."""
    timeout_s: float

    @classmethod
    def of(
        cls, settings: DistributedSection, spec: ModelSpec, *, world: World
    ) -> ShardingSetup | None:
        """Return the settings for a run, or None if its ranks shard nothing."""
        mesh = settings.mesh(world.world_size)
        if mesh.shard == 1:
            return None
        return cls(
            mesh=mesh,
            by_gloo=settings.strategy == "zero3",
            blocks=layer_blocks(spec),
            timeout_s=settings.timeout_s,
        )


def layer_blocks(spec: ModelSpec) -> tuple[int, ...]:
    """Return the number of elements in each matrix of a layer, scaled down to a total limit."""
    linears = spec.linears()
    blocks = [
        each.inputs * each.outputs for each in linears[: len(linears) // max(1, spec.num_layers())]
    ]
    scale = min(1.0, _MOST_ELEMENTS / max(1, sum(blocks)))
    return tuple(int(each * scale) for each in blocks) or _TYPICAL_BLOCKS


def measure_shards(
    world: World, sharded: ShardingSetup, *, all_reduce_bytes_per_s: float
) -> ShardTimes:
    """Return the rates of the collectives and the times of the copies, averaged over the ranks.

    All ranks measure at the same time, because they share a machine's memory and network. The
    measured copies are the copies that FSDP2 makes before and after a collective. Memory is
    allocated and freed as in a step.
    """
    layer = _Layer(sharded)
    group = group_along(sharded.mesh, world.rank, "shard", timeout_s=sharded.timeout_s)
    parts = sharded.mesh.shard
    most = int(all_reduce_bytes_per_s * _SENDING_S / BYTES_PER_WEIGHT / parts)
    sent = max(1024, min(most, sum(layer.sizes)))
    gather_s, sum_s = _collective_times(world, sharded, group, elements=sent)
    dist.destroy_process_group(group)
    copies_s = _quartiles(world, [layer.gather, layer.sum, layer.release])
    own = torch.tensor([gather_s, sum_s, *copies_s[:2]], dtype=torch.float64)
    mean_s = (world.sum(own) / world.world_size).tolist()
    sent_bytes = (parts - 1) * sent * BYTES_PER_WEIGHT
    return ShardTimes(
        gather_bytes_per_s=sent_bytes / mean_s[0],
        sum_bytes_per_s=sent_bytes * (2 if sharded.by_gloo else 1) / mean_s[1],
        copies=CopyTimes(
            gathered_s_per_byte=mean_s[2] / layer.num_bytes,
            summed_s_per_byte=mean_s[3] / layer.num_bytes,
        ),
    )


def _collective_times(
    world: World, sharded: ShardingSetup, group: dist.ProcessGroup, *, elements: int
) -> tuple[float, float]:
    """Return the seconds of a gather and of a reduce-scatter with `elements` per rank."""
    whole, part = torch.ones(sharded.mesh.shard * elements), torch.ones(elements)
    timer, buffers = CollectiveTimer(), Buffers()
    gather, sums = Gather(timer, buffers), SumOfParts(timer, buffers)

    def by_gloo() -> None:
        dist.all_gather_single(whole, part, group=group)

    calls: list[Callable[[], object]] = [
        by_gloo if sharded.by_gloo else lambda: gather(whole, part, group),
        lambda: (
            dist.all_reduce(whole, group=group)
            if sharded.by_gloo
            else sums(part, whole, group, dist.ReduceOp.SUM)
        ),
        lambda: whole.fill_(1.0),
    ]
    gather_s, sum_s, _ = _quartiles(world, calls)
    return gather_s, sum_s


def _quartiles(world: World, calls: list[Callable[[], object]]) -> list[float]:
    """Call the functions in turn until the time is up; return each function's lower-quartile time.

    The quartile is used because the fastest call may have reused memory by chance, and other
    programs slow down some calls.
    """
    took_s: list[list[float]] = [[] for _ in calls]
    world.barrier()
    started_s = time.perf_counter()
    # The ranks' clocks differ: rank 0 decides for all ranks.
    while world.broadcast(time.perf_counter() - started_s < _BUDGET_S or not took_s[0], bool):
        for call, each in zip(calls, took_s, strict=True):
            before_s = time.perf_counter()
            call()
            each.append(time.perf_counter() - before_s)
    return [sorted(each)[len(each) // 4] for each in took_s]


class _Layer:
    """The memory copies that a sharded layer makes, without communication between ranks."""

    def __init__(self, sharded: ShardingSetup) -> None:
        self._shards = sharded.mesh.shard
        self.sizes = [-(-each // self._shards) for each in sharded.blocks]
        self.num_bytes = sum(self.sizes) * self._shards * BYTES_PER_WEIGHT
        self._parts = [torch.ones(size) for size in self.sizes]
        self._total = torch.ones(sum(self.sizes))
        buffers = Buffers()
        self._gather = Gather(CollectiveTimer(), buffers)
        self._sum = SumOfParts(CollectiveTimer(), buffers)
        self._weights: list[Tensor] = []

    def gather(self) -> None:
        """Copy this rank's shards into the collective's buffer, and the buffer to the weights."""
        buffer = self._empty(self._gather, self._shards)
        for place, part in zip(torch.split(buffer[0], self.sizes), self._parts, strict=True):
            place.copy_(part)
        self._weights = [torch.empty(self._shards, size) for size in self.sizes]
        torch.split_with_sizes_copy(buffer, self.sizes, dim=1, out=self._weights)

    def sum(self) -> None:
        """Allocate gradients, copy them into the collective's buffer and keep this rank's shard."""
        gradients = [torch.zeros(self._shards, size) for size in self.sizes]
        given = self._empty(self._sum, self._shards)
        places = torch.split(given, self.sizes, dim=1)
        for place, gradient in zip(places, gradients, strict=True):
            place.copy_(gradient)
        kept = self._empty(self._sum, 1)[0]
        # The sum itself is measured as a part of the collective.
        kept.copy_(given[0])
        self._total.add_(kept.div_(self._shards))

    def release(self) -> None:
        """Free the weights, as after a layer's forward or backward pass."""
        self._weights = []

    def _empty(self, comm: Gather | SumOfParts, parts: int) -> Tensor:
        shape = (parts * sum(self.sizes),)
        made = comm.allocate(shape, dtype=torch.float32, device=self._total.device)
        return made.view(parts, -1)
