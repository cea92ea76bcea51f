"""The versions, the commit and the machine that a page names."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.contenders import REPO
from benchmarks.machine import describe_machine

REQUIRED = ("accelerate", "numpy", "psutil", "safetensors", "torch")
"""Packages that every stage needs."""
_NAMED = ("torch", "accelerate", "transformers", "peft", "triton", "bitsandbytes", "torchao")


def missing_packages(names: Sequence[str] = REQUIRED) -> list[str]:
    """Return the packages that this Python lacks."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def device_facts(device: Mapping[str, Any]) -> dict[str, str]:
    """Return GPU, versions and machine for the page, from the probe's facts if it ran."""
    found = {}
    if "driver" in device:
        found["GPU"] = (
            f"{device['device']}, {device['memory_gib']} GiB, compute capability "
            f"{device['capability']}; driver {device['driver']}, CUDA {device['cuda']}, "
            f"NCCL {device['nccl']}"
        )
    elif device:
        found["GPU"] = "none: a rehearsal on the CPU with small sizes, whose speeds mean nothing"
    versions = {"python": platform.python_version()}
    versions |= {name: _version(name) for name in _NAMED}
    if "torch" in device:
        # With the build: 2.11.0+cu130.
        versions["torch"] = device["torch"]
    found["Versions"] = ", ".join(f"{name} {number}" for name, number in versions.items())
    found["Machine"] = describe_machine()
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def commit_of_checkout() -> str:
    """Return the checkout's commit, and whether its files differ from it."""
    try:
        commit, changed = (
            subprocess.run(
                ["git", *words], cwd=REPO, capture_output=True, text=True, timeout=20, check=True
            ).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown: not a git checkout"
    return f"{commit} with local changes" if changed else commit
