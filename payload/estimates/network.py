"""The network between ranks: its speeds, and the time of an all-reduce over it."""

from __future__ import annotations

from dataclasses import dataclass

# gloo's all-reduce of 32 MB of fp32 between two ranks over loopback: gradient bytes over time, on
# two busy cores of the development machine; torchft PR #199 has 15-19 Gbit/s for 4-40 MB.
LOOPBACK_BYTES_PER_S = 1.5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTimes:
    """Times of a sharded rank's copies around its collectives, page faults included.

    Source of the copies: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """

    gathered_s_per_byte: float
    """Time for a gathered weight: the rank's shard into the collective's buffer, and the whole
    into the weight, whose memory is newly allocated."""
    summed_s_per_byte: float
    """Time for a gradient: its newly allocated memory, the copy into the collective's buffer, and
    the mean and accumulation of the rank's shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTimes:
    """Speeds that sharded ranks measure before training: of collectives, and of copies."""

    gather_bytes_per_s: float
    """Rate at which a rank sends in an all-gather, summed over the receivers."""
    sum_bytes_per_s: float
    """Rate at which a rank sends in a reduce-scatter."""
    copies: CopyTimes


PLANNED_COPIES = CopyTimes(gathered_s_per_byte=0.3e-9, summed_s_per_byte=0.4e-9)
"""One core's times, if no trainer has measured them (`measure_shards`): a layer of GPT-2 124M on
each of two busy cores of the development machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network over which ranks exchange gradients in a ring."""

    ranks: int
    bytes_per_s: float
    """Send rate of the slowest link while it also receives: all ranks wait for it."""
    latency_s: float = 0.0
    """Latency of one round of a ring. 0 if `bytes_per_s` was measured on all-reduces of
    about a bucket's size, which include it."""
    busy_s_per_byte: float = 0.0
    """Compute time that a rank loses for each byte that it sends."""
    convert_s_per_number: float = 0.0
    """Compute time that a rank loses for each gradient converted to bf16 for sending."""
    shards: ShardTimes | None = None
    """Measurements by sharded ranks; None = not measured."""

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the seconds until all ranks have the sum of `num_bytes` of each."""
        rounds = 2 * (self.ranks - 1)
        return rounds * self.latency_s + sends_per_byte(self.ranks) * num_bytes / self.bytes_per_s


def sends_per_byte(ranks: int) -> float:
    """Return how often a ring all-reduce sends each gradient byte: 2 (N-1)/N."""
    return 2 * (ranks - 1) / ranks
