"""Libraries with imports of seconds, which each test worker should not load at its start."""

from __future__ import annotations

from typing import Any


def peft() -> Any:
    """Return PEFT."""
    import peft

    return peft


def bitsandbytes() -> Any:
    """Return bitsandbytes."""
    import bitsandbytes

    return bitsandbytes


def float8_linear() -> Any:
    """Return torchao's linear of 8-bit floats."""
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear


def google_compute() -> Any:
    """Return Google's client library for Compute Engine."""
    from google.cloud import compute_v1

    return compute_v1
