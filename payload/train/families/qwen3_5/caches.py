"""The state that generation keeps for each layer with linear attention."""

from __future__ import annotations

import torch
from torch import Tensor


class DeltaCache:
    """The state of the gated delta rule, and the convolution's input for the last tokens."""

    def __init__(self) -> None:
        self.state: Tensor | None = None
        """The state after the last token, (B, H, K, V) fp32."""
        self._window: Tensor | None = None
        self._tokens = 0

    def with_window(self, x: Tensor, *, before: int) -> Tensor:
        """Append the new tokens' input x (B, T, C).

        Return x preceded by the input of the last `before` tokens.
        """
        self._tokens += x.shape[1]
        window = x.new_zeros(len(x), before, x.shape[2]) if self._window is None else self._window
        joined = torch.cat((window, x), dim=1)
        self._window = joined[:, joined.shape[1] - before :]
        return joined

    def num_tokens(self) -> int:
        """Return the number of tokens processed so far."""
        return self._tokens
