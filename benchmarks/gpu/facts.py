"""The GPU, the versions and the machine on the page of a visit."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import describe_machine, package_versions

REQUIRED = ("accelerate", "numpy", "psutil", "safetensors", "torch")
"""Packages that every stage needs."""
_NAMED = (
    "torch",
    "accelerate",
    "transformers",
    "peft",
    "trl",
    "datasets",
    "triton",
    "bitsandbytes",
    "torchao",
)


def missing_packages(names: Sequence[str] = REQUIRED) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def device_facts(device: Mapping[str, Any]) -> dict[str, str]:
    """Return GPU, versions and machine for the page, with the probe's facts if it ran."""
    found = {}
    if "driver" in device:
        found["GPU"] = (
            f"{device['device']}, {device['memory_gib']} GiB, compute capability "
            f"{device['capability']}; driver {device['driver']}, CUDA {device['cuda']}, "
            f"NCCL {device['nccl']}"
        )
    elif device:
        found["GPU"] = "none: a rehearsal on the CPU with small sizes, whose speeds mean nothing"
    versions = {"python": platform.python_version(), **package_versions(_NAMED)}
    if "torch" in device:
        # With the build: 2.11.0+cu130.
        versions["torch"] = device["torch"]
    found["Versions"] = ", ".join(f"{name} {number}" for name, number in versions.items())
    found["Machine"] = describe_machine()
    return found
