"""The number formats that a run may compute in."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["bf16", "fp32"]
BF16_MIN_GAIN = 1.1
"""Lowest speed of bf16, relative to fp32, at which `auto` resolves to bf16, which rounds more."""
