"""What this node can do: the GEMM peak that MFU is measured against, and the network's speed.

Measured by all ranks at the same time, each on its own cores, as they will train.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from payload.run_config import DtypeChoice
from payload.train.world import World

Dtype = Literal["bf16", "fp32"]

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}

# The large product is the one that AMX needs to reach its peak; the small one takes 5 ms at 0.4
# TFLOP/s, so that on a busy machine some of many fall between two interruptions.
_GEMM_SIZES = (1024, 2048)
_GEMM_BUDGET_S = 0.4
# bf16 rounds; it has to be worth it.
_BF16_MIN_GAIN = 1.1
_ALL_REDUCE_BYTES = 16 * 2**20
_ALL_REDUCE_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured over all ranks."""

    dtype: Dtype
    """What the run computes in."""
    reason: str
    """Why that one, for people."""
    peak_flops_per_s: float
    """Sum over ranks, for `dtype`."""
    all_reduce_bytes_per_s: float | None
    """Gradient bytes that all ranks have summed in a second; None with one rank."""


def calibrate(world: World, choice: DtypeChoice) -> Calibration:
    """Measure, and choose the dtype. Every rank gets the same answer."""
    world.barrier()
    dtypes: tuple[Dtype, ...] = ("bf16", "fp32") if choice == "auto" else (choice,)
    measured = torch.tensor([_gemm_flops_per_s(TORCH_DTYPES[dtype]) for dtype in dtypes])
    peaks = dict(zip(dtypes, world.sum(measured.double()).tolist(), strict=True))
    dtype, reason = _choose(choice, peaks)
    return Calibration(
        dtype=dtype,
        reason=reason,
        peak_flops_per_s=peaks[dtype],
        all_reduce_bytes_per_s=_all_reduce_bytes_per_s(world),
    )


def _choose(choice: DtypeChoice, peaks: dict[Dtype, float]) -> tuple[Dtype, str]:
    if choice != "auto":
        return choice, "as configured"
    gain = peaks["bf16"] / peaks["fp32"]
    compared = f"bf16 products run at {gain:.1f}x the speed of fp32 here"
    if gain >= _BF16_MIN_GAIN:
        return "bf16", compared
    return "fp32", f"{compared}, not worth the rounding"


def _gemm_flops_per_s(dtype: torch.dtype) -> float:
    """The best of many square products: the peak, not the average under noise."""
    return max(2 * size**3 / _best_product_s(size, dtype) for size in _GEMM_SIZES)


def _best_product_s(size: int, dtype: torch.dtype) -> float:
    left = torch.full((size, size), 0.5, dtype=dtype)
    out = torch.empty_like(left)
    torch.mm(left, left, out=out)
    best, started_s = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - started_s < _GEMM_BUDGET_S:
        before_s = time.perf_counter()
        torch.mm(left, left, out=out)
        best = min(best, time.perf_counter() - before_s)
    return best


def _all_reduce_bytes_per_s(world: World) -> float | None:
    if world.world_size == 1:
        return None
    payload = torch.ones(_ALL_REDUCE_BYTES // 4)
    best = float("inf")
    for _ in range(_ALL_REDUCE_ROUNDS + 1):
        world.barrier()
        before = time.perf_counter()
        dist.all_reduce(payload)
        best = min(best, time.perf_counter() - before)
    slowest = torch.tensor([best], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(_ALL_REDUCE_BYTES / slowest.item())
