"""The number formats that a run may compute in."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["bf16", "fp32"]
BF16_MIN_GAIN = 1.1
"""From this ratio to the speed in fp32 on, `auto` is bf16: it rounds, so it has to be worth it."""
