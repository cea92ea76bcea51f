"""The network between ranks: its speeds, and the time of an all-reduce over it."""

from __future__ import annotations

from dataclasses import dataclass

# gloo's all-reduce of 32 MB of fp32 between two ranks over loopback: gradient bytes over time, on
# two busy cores of the development machine; torchft PR #199 has 15-19 Gbit/s for 4-40 MB.
LOOPBACK_BYTES_PER_S = 1.5e9


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


def sends_per_byte(ranks: int) -> float:
    """Return the times that a ring all-reduce sends each gradient byte: 2 (N-1)/N."""
    return 2 * (ranks - 1) / ranks
