"""Measure the GEMM peak as a run's calibration does, and directly, as JSON in FLOP/s.

The matmuls are in bf16 on a GPU, and in fp32 on the CPU of a rehearsal.

The direct measurement queues matmuls of random numbers and reads the device's clock once, so that
it has no gap between two matmuls.

    python -m benchmarks.gpu.probe_peak cuda FILE
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from payload.config.launch_sections import DeviceSection
from payload.core.dtype import Dtype
from payload.train.gemm_and_network_benchmark import TORCH_DTYPES, gemm_peak
from payload.train.ranks.world import World

_BUDGET_S = 0.5
_SIZES = {"cpu": 1024, "cuda": 8192}
_WARM_UP, _ROUND, _ROUNDS = 3, 20, 5


def main(device: str, path: Path) -> None:
    """Write both rates."""
    world = World.from_env({}).on(DeviceSection(kind="cuda" if device == "cuda" else "cpu"))
    dtype: Dtype = "fp32" if world.is_cpu else "bf16"
    found = {
        "calibrated": gemm_peak(world, dtype, budget_s=_BUDGET_S),
        "direct": direct_flops_per_s(world, dtype, _SIZES[device]),
    }
    path.write_text(json.dumps(found), encoding="utf-8")


def direct_flops_per_s(world: World, dtype: Dtype, size: int) -> float:
    """Return the highest rate of several rounds of square matmuls, in FLOP/s."""
    left, right = (
        torch.randn(size, size, device=world.device).to(TORCH_DTYPES[dtype]) for _ in range(2)
    )
    out = torch.empty_like(left)
    round_length = 2 if world.is_cpu else _ROUND
    best_s = min(
        _round_s(world, left, right, out, count=count)
        for count in (_WARM_UP, *[round_length] * _ROUNDS)
    )
    return 2 * size**3 / best_s


def _round_s(
    world: World, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, count: int
) -> float:
    """Return the time of one of `count` queued matmuls."""
    world.synchronize()
    started_s = time.perf_counter()
    for _ in range(count):
        torch.mm(left, right, out=out)
    world.synchronize()
    return (time.perf_counter() - started_s) / count


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
