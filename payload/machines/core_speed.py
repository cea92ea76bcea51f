"""CONTRACT: the GEMM peak of CPU cores, and the expected MFU of a training step.

Matmuls run at the GEMM peak. The time of pointwise ops does not depend on the peak, so a higher
peak means a lower MFU. Pointwise ops take several times as long without the project's bf16 kernels
for the layers. In a narrow model, pointwise ops take a larger share of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from payload.core.dtype import Dtype

CpuClass = Literal["amx", "avx512_bf16", "avx512", "avx2", "arm_bf16", "arm"]
"""A kind of CPU by the widest instructions for matmuls."""

CPU_NAMES: Mapping[CpuClass, str] = {
    "amx": "AMX",
    "avx512_bf16": "AVX-512 and bf16",
    "avx512": "AVX-512",
    "avx2": "AVX2",
    "arm_bf16": "Arm's bf16",
    "arm": "Arm's NEON",
}
"""The classes as they are named in messages."""

EMULATED_BF16_CORE_FLOPS_PER_S = 0.03e12
"""GEMM peak of a core in emulated bf16, measured on a Xeon with AVX-512 without bf16 instructions.
"""
_TYPICAL_CORE_FLOPS_PER_S: Mapping[CpuClass, Mapping[Dtype, float]] = {
    "amx": {"bf16": 1.2e12, "fp32": 0.16e12},
    "avx512_bf16": {"bf16": 0.27e12, "fp32": 0.16e12},
    "avx512": {"bf16": EMULATED_BF16_CORE_FLOPS_PER_S, "fp32": 0.17e12},
    "avx2": {"bf16": EMULATED_BF16_CORE_FLOPS_PER_S, "fp32": 0.073e12},
    "arm_bf16": {"bf16": 0.16e12, "fp32": 0.08e12},
    "arm": {"bf16": EMULATED_BF16_CORE_FLOPS_PER_S, "fp32": 0.04e12},
}
"""GEMM peak that is assumed for a core if it was not measured.

Measured on pages in benchmarks/results: AMX 1.16 to 1.29 and 0.16 TFLOP/s (step_xeon-amx-2-cores
and peak_xeon-amx-2-cores), AVX-512 with bf16 0.21 to 0.45 in bf16 (step_epyc-2-cores and
step_smollm2_epyc-2-cores), AVX-512 without bf16 0.17 (step_smollm2_xeon-fp32-2-cores). AVX2 was
measured in fp32 on an EPYC. Emulated bf16 was not measured with AVX2.

The rows for Arm were not measured. A core of Neoverse V1 or V2 does 32 fp32 FLOP a cycle at 2.6 to
3 GHz, and a core of N1 does 16. A GEMM is assumed to reach 0.9 of this peak, and bf16 counts as
twice as fast as fp32.
"""
GPU_MFU = 0.35
"""Expected MFU on a GPU; not measured."""

_KERNELS_FLOPS_PER_S = 1.0e12
_NO_KERNELS_FLOPS_PER_S = 0.35e12
_WIDE = 512
_COMMON_CLASS: CpuClass = "avx512_bf16"
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


def cpu_class(flags: Collection[str]) -> CpuClass | None:
    """Return the class of a CPU with these flags; None for any other CPU, and without flags."""
    if "amx_bf16" in flags:
        return "amx"
    if "avx512f" in flags:
        return "avx512_bf16" if "avx512_bf16" in flags else "avx512"
    if "avx2" in flags:
        return "avx2"
    # Every 64-bit Arm CPU that runs Linux has this flag.
    if "asimd" in flags:
        return "arm_bf16" if "bf16" in flags else "arm"
    return None


def typical_core_flops_per_s(
    dtype: Dtype, *, emulates_bf16: bool, cpu: CpuClass | None = None
) -> float:
    """Return a typical core's GEMM peak, for machines that were not measured.

    An unknown class counts as AVX-512 with bf16.
    """
    if dtype == "bf16" and emulates_bf16:
        return EMULATED_BF16_CORE_FLOPS_PER_S
    return _TYPICAL_CORE_FLOPS_PER_S[cpu or _COMMON_CLASS][dtype]


def table_source(cpu: CpuClass | None) -> str:
    """Return text which says that a speed comes from this table, and names the CPU's class."""
    return f"from a table for CPUs with {CPU_NAMES[cpu or _COMMON_CLASS]}"
