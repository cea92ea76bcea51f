"""A layer's keys and values of the tokens processed so far, for generation."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """One layer's keys and values of the tokens processed so far, (B, H, T, C / H) each."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values; return the keys and values of all tokens."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat((self.keys, keys), dim=2)
            values = torch.cat((self.values, values), dim=2)
        self.keys, self.values = keys, values
        return keys, values

    def num_tokens(self) -> int:
        """Return the number of tokens processed so far."""
        return 0 if self.keys is None else self.keys.shape[2]
