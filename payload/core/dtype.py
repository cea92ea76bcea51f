"""The number formats that a run may compute in."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["bf16", "fp32"]
