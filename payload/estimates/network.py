"""Describes the network between ranks, and predicts the time of an all-reduce."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTimes:
    """The times of a sharded rank's copies around its collectives, including page faults.

    Source of the copies: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """

    gathered_s_per_byte: float
    """Time per byte of a gathered weight: copies of the rank's shard into the collective's buffer,
    and of the gathered weight into newly allocated memory."""
    summed_s_per_byte: float
    """Time per byte of a gradient: allocation of memory, the copy into the collective's buffer, and
    averaging and accumulating the rank's shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTimes:
    """The speeds of collectives and copies that sharded ranks measure before training."""

    gather_bytes_per_s: float
    """Rate at which a rank sends in an all-gather, summed over the receivers."""
    sum_bytes_per_s: float
    """Rate at which a rank sends in a reduce-scatter."""
    copies: CopyTimes


PLANNED_COPIES = CopyTimes(gathered_s_per_byte=0.3e-9, summed_s_per_byte=0.4e-9)
"""Copy times of one core, used if no run has measured them (`measure_shards`). The values were
measured with a layer of GPT-2 124M on two busy cores of the development machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection of a rank to the next rank of a ring."""

    bytes_per_s: float
    """Rate at which a rank sends while it also receives."""
    busy_s_per_byte: float = 0.0
    """Compute time that a rank loses for each byte that it sends."""

    def network(self, ranks: int, *, shards: ShardTimes | None = None) -> Network:
        """Return a network of `ranks` ranks with this link between each two of them."""
        return Network(
            ranks=ranks,
            bytes_per_s=self.bytes_per_s,
            busy_s_per_byte=self.busy_s_per_byte,
            shards=shards,
        )


LOCAL_LINK = Link(bytes_per_s=1.5e9, busy_s_per_byte=0.48e-9)
"""The link of ranks on one machine, whose cores also copy and sum what the ranks exchange.

The rate is that of gradient bytes in gloo's all-reduce of 32 MB of fp32 between two ranks, on two
busy cores of the development machine; torchft PR #199 reports 15-19 Gbit/s for 4-40 MB. The compute
time was measured with GPT-2's gradients (docs/explanations/scaling.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network over which ranks exchange gradients in a ring."""

    ranks: int
    bytes_per_s: float
    """Rate at which the slowest link sends while it also receives. All ranks wait for this link."""
    latency_s: float = 0.0
    """Latency of one round of a ring. 0 if `bytes_per_s` comes from all-reduces of about a bucket's
    size, because their times already include the latency."""
    busy_s_per_byte: float = 0.0
    """Compute time that a rank loses for each byte that it sends."""
    convert_s_per_number: float = 0.0
    """Compute time that a rank loses for each gradient converted to bf16 for sending."""
    shards: ShardTimes | None = None
    """Measurements of sharded ranks; None = not measured."""

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the seconds of an all-reduce of `num_bytes` over all ranks."""
        rounds = 2 * (self.ranks - 1)
        return rounds * self.latency_s + sends_per_byte(self.ranks) * num_bytes / self.bytes_per_s


def sends_per_byte(ranks: int) -> float:
    """Return how often a ring all-reduce sends each gradient byte: 2 (N-1)/N."""
    return 2 * (ranks - 1) / ranks
