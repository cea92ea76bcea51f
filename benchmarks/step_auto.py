"""`benchmarks.step --auto`: the settings that fit this machine, and its result as one line."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import machine_class, today
from benchmarks.model_configs import SMOLLM2_135M
from benchmarks.peak import KINDS, Peak
from payload.core.dtype import Dtype
from payload.kernels.unavailable import KernelsUnavailableError

_FAST_BF16 = ("amx", "avx512_bf16")
"""The classes of CPUs on which runs compute in bf16."""
_FOUR_SEQUENCES_BYTES = 20 * 10**9
"""Memory that a machine must have for transformers to train on 4 x 1024 tokens, which takes 13
GB."""


def apply_auto(arguments: argparse.Namespace, folder: Path) -> None:
    """Set the options that `--auto` decides; a model's folder is made in `folder` if necessary."""
    arguments.transformers = True
    arguments.dtype = dtype_of(machine_class())
    if arguments.model is None:
        text = json.dumps(SMOLLM2_135M)
        (folder / "config.json").write_text(text, encoding="utf-8")
        arguments.model = str(folder)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory < _FOUR_SEQUENCES_BYTES:
        arguments.micro_batch_size = 1


def dtype_of(cpu_class: str) -> Dtype:
    """Return the dtype that a run resolves on a CPU of this class."""
    return "bf16" if cpu_class in _FAST_BF16 else "fp32"


def instruction_peak(dtype: Dtype) -> tuple[str, float] | None:
    """Return the fastest instructions for `dtype` and their FLOP/s on all threads, or None."""
    try:
        peak = Peak(budget_s=0.2, rounds=3)
    except KernelsUnavailableError:
        return None
    for kind in KINDS:
        if kind.endswith(dtype):
            threads = torch.get_num_threads()
            found = peak.flops_per_s(kind, "registers", threads=threads)
            if found is not None:
                return kind, found
    return None


def line(result: Mapping[str, Any], arguments: argparse.Namespace, *, shape: str) -> str:
    """Return the result of the step benchmark as one line."""
    dtype = arguments.dtype
    peak = instruction_peak(dtype)
    instructions = "" if peak is None else f"{peak[0]} instructions {peak[1] / 1e12:.2f} TFLOP/s, "
    mfu = "unknown" if result["mfu"] is None else f"{result['mfu']:.2f}"
    versions = result["versions"]["tileforge"]
    sizes = f"{arguments.micro_batch_size} x {arguments.sequence_length} tokens"
    return (
        f"class {machine_class()}, {os.cpu_count()} CPUs, {instructions}"
        f"GEMM {result['peak_flops_per_s'] / 1e12:.2f} TFLOP/s; {shape}, {sizes}, {dtype}: "
        f"{result['tokens_per_s']:.0f} tokens/s, MFU {mfu}, "
        f"{result['ratio_vs_transformers']:.2f} times transformers in "
        f"{result['memory_vs_transformers']:.2f} of its memory "
        f"(tileforge {versions['tileforge']}, torch {versions['torch']}, {today()})"
    )
