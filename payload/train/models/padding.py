"""Finds the padding tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor


def padding_tokens(starts: Tensor | None) -> Tensor | None:
    """Return which tokens (B, T) are padding, or None for a batch without padding.

    For `starts`, see `CausalLM.hidden`. Padding is at the end of a row, and each padding token is
    a separate document. Other documents have two tokens or more.
    """
    found = None if starts is None else final_single_tokens(starts)
    return found if found is not None and bool(found.any()) else None


def final_single_tokens(starts: Tensor) -> Tensor:
    """Return which tokens (B, T) belong to the documents of one token at the end of a row."""
    places = torch.arange(starts.shape[1], device=starts.device)
    return (starts == places).flip(1).long().cumprod(1).flip(1).bool()
