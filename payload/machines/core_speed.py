"""CONTRACT: the GEMM peak of CPU cores, and the expected MFU of a training step.

Matmuls run at the GEMM peak. The time of pointwise ops does not depend on the peak, so a higher
peak means a lower MFU. Pointwise ops take several times as long without the project's bf16 kernels
for the layers. In a narrow model, pointwise ops take a larger share of the step.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from payload.core.dtype import Dtype

TYPICAL_CORE_FLOPS_PER_S: dict[Dtype, float] = {"bf16": 0.27e12, "fp32": 0.16e12}
"""GEMM peak assumed for a core that was not measured, with AVX-512 and without AMX.

Measured in bf16: 0.21 to 0.45 TFLOP/s (benchmarks/results, step_epyc-2-cores and
step_smollm2_epyc-2-cores).
"""
EMULATED_BF16_CORE_FLOPS_PER_S = 0.03e12
"""GEMM peak of a core in emulated bf16, measured on a Xeon with AVX-512 without bf16 instructions.
"""
GPU_MFU = 0.35
"""Expected MFU on a GPU; not measured."""

_KERNELS_FLOPS_PER_S = 1.0e12
_NO_KERNELS_FLOPS_PER_S = 0.35e12
_WIDE = 512
_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


def typical_mfu(*, kernels: bool, core_flops_per_s: float, width: int) -> float:
    """Return the MFU that a step's forward and backward passes are expected to reach.

    `kernels` is True if the layers use the project's kernels, `core_flops_per_s` is a core's peak,
    `width` is the width of the residual stream. The update is not counted. Each step prints its
    MFU.

    Measured MFU, with the expected MFU in brackets (from benchmarks/results). `4 x 1024` is a
    micro-batch of 4 sequences of 1,024 tokens.

    | | TFLOP/s a core | kernels | without |
    |---|---|---|---|
    | GPT-2, 4 x 1024, AVX-512 | 0.21 | 0.81 (0.83) | 0.60 (0.63) |
    | SmolLM2-135M, 4 x 1024, AVX-512 | 0.22 | 0.84 (0.82) | |
    | SmolLM2-135M, 4 x 1024, AVX-512 | 0.45 | 0.73 (0.69) | |
    | SmolLM2-135M, 4 x 1024, AVX-512, fp32 | 0.17 | 0.69 (0.67) | 0.65 (0.67) |
    | GPT-2, 4 x 1024, AMX | 1.16 | 0.45 (0.46) | 0.23 (0.23) |
    | SmolLM2-135M, 4 x 1024, AMX | 1.20 | 0.54 (0.45) | 0.26 (0.23) |
    | Qwen3-0.6B's shape, 1 x 1024, AMX | 1.20 | 0.50 (0.45) | |
    | `tiny`, 8 x 1024, AVX-512 | 0.21 | 0.65 (0.54) | 0.31 (0.29) |

    In fp32 the kernels compute only the loss and the update (step_smollm2_xeon-fp32-2-cores), so
    the expected MFU is the one without kernels. Short sequences reach less: a micro-batch of 64
    texts of about 14 tokens reached 0.52 in fp32, where 0.69 is expected."""
    rate = _KERNELS_FLOPS_PER_S if kernels else _NO_KERNELS_FLOPS_PER_S
    # The width is 0 for some model families.
    rate *= min(1.0, (width or _WIDE) / _WIDE)
    return rate / (rate + core_flops_per_s)


def flags_have_bf16(flags: Collection[str]) -> bool:
    """Return whether a CPU with these flags has bf16 instructions."""
    return any(flag in flags for flag in _FLAGS)


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Return whether this machine's CPU has bf16 instructions, or None if unknown."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    # Arm's kernels write `Features`.
    named = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Feat"))]
    return flags_have_bf16(named[0]) if named else None


def typical_core_flops_per_s(dtype: Dtype, *, emulates_bf16: bool) -> float:
    """Return a typical core's GEMM peak, for machines where it was not measured."""
    if dtype == "bf16" and emulates_bf16:
        return EMULATED_BF16_CORE_FLOPS_PER_S
    return TYPICAL_CORE_FLOPS_PER_S[dtype]
