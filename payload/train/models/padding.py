"""Finds the padding tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor


def padding_tokens(starts: Tensor | None) -> Tensor | None:
    """Return which tokens (B, T) are padding, or None for a batch without padding.

    For `starts`, see `CausalLM.hidden`. Padding is at the end of a row, and each padding token is
    a separate document. Other documents have two tokens or more.
    """
    if starts is None:
        return None
    places = torch.arange(starts.shape[1], device=starts.device)
    found = (starts == places).flip(1).long().cumprod(1).flip(1).bool()
    return found if bool(found.any()) else None
