"""Measures this node's GEMM peak and the network's speed. MFU is computed from the GEMM peak.

All ranks measure at the same time, each on its own cores, as in training.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from payload.config.training_sections import DtypeChoice
from payload.core.dtype import BF16_MIN_GAIN, Dtype
from payload.estimates.network import ShardTimes
from payload.machines.core_speed import has_bf16
from payload.train.models.quantized import QuantizedLinear
from payload.train.ranks.world import World
from payload.train.strategies.shard_calibration import ShardingSetup, measure_shards

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}

# AMX reaches its peak only in the large product. The small product takes 10 ms at 0.2 TFLOP/s:
# short enough to run uninterrupted at times on a busy machine.
_GEMM_SIZES = (1024, 2048)
_GPU_GEMM_SIZES = (4096, 8192)
# In emulated bf16 on AVX2, the small product took 3 s. A product of this size is then enough.
_PROBE_SIZE, _PROBE_BUDGET_S = 256, 0.02
_SLOW_PRODUCT_S = 0.25
_GEMM_BUDGET_S = 0.15
# Corresponds to 0.2 TFLOP/s. On a slower rank, the large product has no higher FLOP/s and takes
# longer than a short round.
_FAST_PRODUCT_S = 0.01
# Messages start small and grow: a first message of 16 MiB would take minutes at 1 Mbit/s.
_EXCHANGE_SIZES = tuple(4 * 2**10 * 4**i for i in range(7))
_EXCHANGE_ROUNDS = 3
_EXCHANGE_BUDGET_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measurements over all ranks."""

    dtype: Dtype
    """The compute dtype of the run."""
    reason: str
    """Reason for that dtype, for the log."""
    peak_flops_per_s: float
    """The GEMM peak in `dtype`, summed over the ranks."""
    all_reduce_bytes_per_s: float | None
    """Gradient bytes all-reduced per second; None with one rank."""
    dequantized_per_s: float | None = None
    """Rate at which a rank dequantises 4-bit weights; None for a run without 4-bit weights."""
    shards: ShardTimes | None = None
    """Times of a sharded run's collectives and copies; None for other runs and on GPUs."""


def calibrate(
    world: World,
    choice: DtypeChoice,
    *,
    quantizes: bool = False,
    sharded: ShardingSetup | None = None,
) -> Calibration:
    """Measure this node and choose the dtype; return the same result on every rank.

    `quantizes` adds the speed of dequantising 4-bit linears. `sharded` adds the times of the
    collectives and copies of a sharded run.
    """
    world.barrier()
    dtypes: tuple[Dtype, ...] = ("bf16", "fp32") if choice == "auto" else (choice,)
    speeds = {dtype: _gemm_flops_per_s(world, dtype, _small_size(world, dtype)) for dtype in dtypes}
    dtype, reason = _choose(choice, _sum_over_ranks(world, speeds))
    peak = _with_large_product(world, dtype, speeds[dtype])
    all_reduce = measure_exchange(world).bytes_per_s() if world.world_size > 1 else None
    shards = None
    if sharded is not None and all_reduce is not None and world.is_cpu:
        shards = measure_shards(world, sharded, all_reduce_bytes_per_s=all_reduce)
    return Calibration(
        dtype=dtype,
        reason=reason,
        peak_flops_per_s=_sum_over_ranks(world, {dtype: peak})[dtype],
        all_reduce_bytes_per_s=all_reduce,
        dequantized_per_s=_dequantized_per_s(world, dtype) if quantizes else None,
        shards=shards,
    )


def _dequantized_per_s(world: World, dtype: Dtype) -> float:
    """Return the number of weights that a rank dequantises per second, as the mean over the ranks.

    All ranks measure at the same time.
    """
    linear = QuantizedLinear(nn.Linear(_GEMM_SIZES[1], _GEMM_SIZES[1], bias=False))
    linear.take(torch.full(linear.size(), 0.5, dtype=torch.bfloat16))
    world.barrier()
    best, started_s = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - started_s < _GEMM_BUDGET_S:
        before_s = time.perf_counter()
        linear.dequantized(TORCH_DTYPES[dtype])
        best = min(best, time.perf_counter() - before_s)
    rate = torch.tensor(linear.in_features * linear.out_features / best, dtype=torch.float64)
    return float(world.sum(rate)) / world.world_size


def _sum_over_ranks(world: World, speeds: dict[Dtype, float]) -> dict[Dtype, float]:
    """Return the sum of each speed over all ranks."""
    values = torch.tensor(list(speeds.values()), dtype=torch.float64)
    return dict(zip(speeds, world.sum(values).tolist(), strict=True))


def _choose(choice: DtypeChoice, speeds: dict[Dtype, float]) -> tuple[Dtype, str]:
    if choice != "auto":
        return choice, "as configured"
    gain = speeds["bf16"] / speeds["fp32"]
    compared = f"bf16 matmuls run at {gain:.1f}x the speed of fp32 on this cluster"
    if gain >= BF16_MIN_GAIN:
        return "bf16", compared
    return "fp32", compared if gain < 1 else f"{compared}, too little to accept bf16's rounding"


def _gemm_sizes(world: World) -> tuple[int, int]:
    return _GEMM_SIZES if world.is_cpu else _GPU_GEMM_SIZES


def _small_size(world: World, dtype: Dtype) -> int:
    """Return the size of the small matmul: a tiny one if emulated bf16 is very slow.

    Other programs disturb tiny matmuls most, so only a CPU without bf16 measures them.
    """
    small, _ = _gemm_sizes(world)
    if not world.is_cpu or dtype != "bf16" or has_bf16() is not False:
        return small
    factors = _factors(world, _PROBE_SIZE, TORCH_DTYPES[dtype])
    probe_s = _best_product_s(world, *factors, budget_s=_PROBE_BUDGET_S)
    return small if probe_s * (small / _PROBE_SIZE) ** 3 < _SLOW_PRODUCT_S else _PROBE_SIZE


def gemm_peak(world: World, dtype: Dtype, *, budget_s: float) -> float:
    """Return this rank's GEMM peak in FLOP/s; each size of matmul is measured for `budget_s`."""
    small = _gemm_flops_per_s(world, dtype, _small_size(world, dtype), budget_s=budget_s)
    return _with_large_product(world, dtype, small, budget_s=budget_s)


def _with_large_product(
    world: World, dtype: Dtype, speed: float, *, budget_s: float = _GEMM_BUDGET_S
) -> float:
    """Return the higher of `speed` and the large matmul's speed, in FLOP/s.

    `speed` is the small matmul's speed. The large matmul is only measured on ranks
    on which the small matmul is fast.
    """
    small, large = _gemm_sizes(world)
    if speed * _FAST_PRODUCT_S <= 2 * small**3:
        return speed
    return max(speed, _gemm_flops_per_s(world, dtype, large, budget_s=budget_s))


def _gemm_flops_per_s(
    world: World, dtype: Dtype, size: int, *, budget_s: float = _GEMM_BUDGET_S
) -> float:
    """Return the FLOP/s of the fastest of many square matmuls of `size`.

    The fastest matmul is the least affected by other programs.
    """
    factors = _factors(world, size, TORCH_DTYPES[dtype])
    best_s = _best_product_s(world, *factors, budget_s=budget_s)
    return 2 * size**3 / best_s


def gemm_rounds_flops_per_s(world: World, *, rounds: int, round_s: float) -> dict[Dtype, float]:
    """Return this rank's FLOP/s per dtype: the median, over short rounds, of the best matmul.

    All ranks multiply at the same time. They use the same size: the large size if rank 0 is fast.
    """
    factors, (few, many) = {}, _gemm_sizes(world)
    for name, dtype in TORCH_DTYPES.items():
        size = world.broadcast(_small_size(world, name), int)
        small = _factors(world, size, dtype)
        few_s = _best_product_s(world, *small, budget_s=0.0) * (few / size) ** 3
        large = world.broadcast(few_s < _FAST_PRODUCT_S, bool)
        factors[name] = _factors(world, many, dtype) if large else small
    found: dict[Dtype, list[float]] = {name: [] for name in factors}
    for _ in range(rounds):
        for name, (left, out) in factors.items():
            world.barrier()
            best_s = _best_product_s(world, left, out, budget_s=round_s)
            found[name].append(2 * left.shape[0] ** 3 / best_s)
    return {name: statistics.median(speeds) for name, speeds in found.items()}


def _factors(world: World, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a square matrix, and an output buffer with pages that are already mapped."""
    left = torch.full((size, size), 0.5, dtype=dtype, device=world.device)
    if not world.is_cpu:
        # A GPU multiplies equal numbers faster than training's: fewer bits change, so its power
        # limit allows higher clocks.
        left.normal_()
    out = torch.mm(left, left)
    world.synchronize()
    return left, out


def _best_product_s(
    world: World, left: torch.Tensor, out: torch.Tensor, *, budget_s: float
) -> float:
    best, started_s = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - started_s < budget_s:
        before_s = time.perf_counter()
        torch.mm(left, left, out=out)
        world.synchronize()
        best = min(best, time.perf_counter() - before_s)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Speed of an all-reduce over all ranks."""

    num_bytes: int
    """Bytes of the largest message that was sent. On a slow network, the benchmark sends smaller
    messages."""
    took_s: float
    latency_s: float
    """Time to all-reduce the smallest message."""

    def bytes_per_s(self) -> float:
        """Return the bytes all-reduced per second."""
        return self.num_bytes / self.took_s


def measure_exchange(world: World, *, budget_s: float = _EXCHANGE_BUDGET_S) -> Exchange:
    """All-reduce increasingly large tensors while the next round is expected to fit in `budget_s`.

    The first round always runs. All ranks get the same result.
    """
    assert world.world_size > 1, "an all-reduce needs two ranks or more"
    began = time.perf_counter()
    took_s: dict[int, list[float]] = {}
    last_size, last_s = 0, 0.0
    for size in (size for size in _EXCHANGE_SIZES for _ in range(_EXCHANGE_ROUNDS)):
        predicted_s = last_s * size / last_size if last_size else 0.0
        left_s = budget_s - (time.perf_counter() - began)
        # The ranks' clocks differ: rank 0 decides for all ranks.
        if last_size and not world.broadcast(predicted_s < left_s, bool):
            break
        last_size, last_s = size, _all_reduce_s(world, size)
        took_s.setdefault(size, []).append(last_s)
    return Exchange(
        num_bytes=last_size,
        took_s=min(took_s[last_size]),
        latency_s=min(took_s[_EXCHANGE_SIZES[0]]),
    )


def _all_reduce_s(world: World, num_bytes: int) -> float:
    """Return the slowest rank's time for an all-reduce of `num_bytes`."""
    values = torch.ones(num_bytes // 4, device=world.device)
    world.barrier()
    before = time.perf_counter()
    dist.all_reduce(values)
    world.synchronize()
    took_s = torch.tensor([time.perf_counter() - before], dtype=torch.float64)
    dist.all_reduce(took_s, op=dist.ReduceOp.MAX)
    return float(took_s.item())


def receive_bytes_per_s(world: World, *, num_bytes: int) -> float:
    """Return the rate at which this rank receives from the previous rank in a ring of all ranks."""
    sent, received = torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
    world.barrier()
    before = time.perf_counter()
    sending = dist.isend(sent, (world.rank + 1) % world.world_size)
    receiving = dist.irecv(received, (world.rank - 1) % world.world_size)
    assert sending is not None and receiving is not None
    receiving.wait()
    took_s = time.perf_counter() - before
    sending.wait()
    return num_bytes / took_s
