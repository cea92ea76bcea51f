"""The attention mask of rows that hold several documents."""

from __future__ import annotations

import torch
from torch import Tensor


def documents_mask(starts: Tensor, *, window: int | None = None) -> Tensor:
    """Return which tokens each token attends to, (B, 1, T, T) bool, from `starts` (B, T).

    A token attends to itself and to the earlier tokens of its document; with a window, only to the
    last `window` of these tokens.
    """
    length = starts.shape[1]
    places = torch.arange(length, device=starts.device)
    first = starts if window is None else starts.maximum(places - window + 1)
    within = (places >= first.unsqueeze(2)) & (places <= places.unsqueeze(1))
    return within.unsqueeze(1)
