"""The number formats that a run may compute in."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["bf16", "fp32"]
BF16_MIN_GAIN = 1.1
"""`auto` resolves to bf16 if bf16 is at least this many times as fast as fp32. bf16 is only worth
its larger rounding errors if it is faster."""
