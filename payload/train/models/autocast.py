"""The dtype of matmuls under autocast, for operations that autocast does not know."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype in which a matmul of `values` computes: autocast's if it is enabled."""
    kind = values.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return values.dtype
