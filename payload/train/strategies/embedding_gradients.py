"""Exchanges the token embedding's gradient, mostly during the layers' backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from payload.kernels.accumulate import TokenGradient, add_rows
from payload.kernels.library import Library


@dataclass(frozen=True, slots=True)
class Rows:
    """The gradient of the embedding lookup, with one row for each token that any rank looked up."""

    weight: nn.Parameter
    indices: Tensor
    """Shape (U,): distinct tokens, the same on every rank."""
    gradient: Tensor
    """Shape (U, C): the gradient of this rank, not yet summed over the ranks."""

    def add(self) -> None:
        """Add the rows to the weight's gradient."""
        assert self.weight.grad is not None
        self.weight.grad.index_add_(0, self.indices, self.gradient)


class TokenExchange(TokenGradient):
    """Exchanges the two parts of a tied embedding's gradient separately in the last micro-batch.

    The weight (V, C) is used as output head and as embedding. The head's part of the gradient is
    ready before the layers' backward pass, so the exchange of this part overlaps with that pass.
    The embedding's part has rows only for tokens that were looked up. These few rows are exchanged
    last.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        library: Library | None,
        *,
        place: Tensor,
        head_is_done: Callable[[], None],
    ) -> None:
        super().__init__(library)
        self._weight = weight
        self._place = place
        self._place_is_taken = False
        """True while a micro-batch uses the exchange buffer for its head gradient."""
        self._head_is_done = head_is_done
        self._was_read: Tensor | None = None
        """Shape (V,): 1 for each token that some rank looks up. Set only in a step's last
        micro-batch."""
        self._asked: Any = None
        self._parts: list[tuple[Tensor, Tensor]] = []

    def begin(self, tokens: Tensor) -> None:
        """Prepare the step's last backward pass.

        This starts the exchange of the set of tokens that each rank looks up.
        """
        self._was_read = torch.zeros(len(self._weight), dtype=torch.uint8)
        self._was_read[tokens.flatten()] = 1
        self._asked = dist.all_reduce(self._was_read, op=dist.ReduceOp.MAX, async_op=True)

    def head_gradient(self, weight: Tensor) -> Tensor:
        """Return the memory in which the head's gradient is computed.

        The first gradient of a step is computed in the exchange buffer, and later gradients are
        added to it. Only one micro-batch at a time uses the buffer. If a micro-batch has
        no backward pass, the buffer stays in use. Gradients are then computed in other memory
        and copied.
        """
        if weight.grad is not None or self._place_is_taken:
            return super().head_gradient(weight)
        self._place_is_taken = True
        return self._place

    def add_head(self, weight: Tensor, gradient: Tensor, scale: float) -> None:
        """Add the gradient; in a last micro-batch, start the exchange of the whole gradient."""
        if gradient.data_ptr() == self._place.data_ptr():
            self._place_is_taken = False
        super().add_head(weight, gradient, scale)
        if self._was_read is not None:
            self._head_is_done()

    def add_rows(self, weight: Tensor, indices: Tensor, rows: Tensor) -> None:
        """Add the rows; in a last micro-batch, keep them until the gradient is exchanged."""
        if self._was_read is None:
            super().add_rows(weight, indices, rows)
        else:
            self._parts.append((indices, rows))

    def rows(self) -> Rows:
        """Return the kept rows after the last micro-batch."""
        assert self._was_read is not None, "begin() comes first"
        self._asked.wait()
        places = self._was_read.cumsum(0) - 1
        found = self._was_read.nonzero().flatten()
        gradient = torch.zeros(len(found), self._weight.shape[1])
        for indices, rows in self._parts:
            add_rows(gradient, places[indices], rows, self.library)
        self._was_read, self._asked = None, None
        self._parts.clear()
        return Rows(self._weight, found, gradient)
