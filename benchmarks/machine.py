"""A result's description of the machine that it was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """Architecture, cores, and the processor's name where the system tells it."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {cpu_name()}"


def cpu_name() -> str:
    """Return the processor's name, or an empty string where it is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")
