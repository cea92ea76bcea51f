"""The token embedding's gradient between ranks: most of it travels while the layers go back."""

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
    """The gradient as embedding, with a row for each token that any rank read."""

    weight: nn.Parameter
    indices: Tensor
    """(U,) tokens, the same on every rank."""
    gradient: Tensor
    """(U, C), this rank's; to be summed over all."""

    def add(self) -> None:
        """To the weight's gradient."""
        assert self.weight.grad is not None
        self.weight.grad.index_add_(0, self.indices, self.gradient)


class TokenExchange(TokenGradient):
    """Keeps the gradient's two parts apart in a step's last pass.

    As output head the weight (V, C) has its gradient before the layers' backward pass begins, and
    that travels meanwhile. As embedding it has one for tokens that were read only: these rows come
    when all else is done, and are few.
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
        """By a pass that has yet to go back."""
        self._head_is_done = head_is_done
        self._was_read: Tensor | None = None
        """(V,) which tokens some rank read, in a last pass."""
        self._asked: Any = None
        self._parts: list[tuple[Tensor, Tensor]] = []

    def begin(self, tokens: Tensor) -> None:
        """The step's last pass, which read `tokens`, goes back: ask which the others read."""
        self._was_read = torch.zeros(len(self._weight), dtype=torch.uint8)
        self._was_read[tokens.flatten()] = 1
        self._asked = dist.all_reduce(self._was_read, op=dist.ReduceOp.MAX, async_op=True)

    def head_place(self, weight: Tensor) -> Tensor:
        """For a step's first pass where it travels from; other passes' are added to that.

        It serves one pass at a time. A loss that is not taken back keeps it: then others' are
        copied.
        """
        if weight.grad is not None or self._place_is_taken:
            return super().head_place(weight)
        self._place_is_taken = True
        return self._place

    def add_head(self, weight: Tensor, gradient: Tensor, scale: float) -> None:
        """As ever; in a last pass all that the weight's gradient holds is given away."""
        if gradient.data_ptr() == self._place.data_ptr():
            self._place_is_taken = False
        super().add_head(weight, gradient, scale)
        if self._was_read is not None:
            self._head_is_done()

    def add_rows(self, weight: Tensor, indices: Tensor, rows: Tensor) -> None:
        """As ever; in a last pass they are kept, since the weight's gradient is on its way."""
        if self._was_read is None:
            super().add_rows(weight, indices, rows)
        else:
            self._parts.append((indices, rows))

    def rows(self) -> Rows:
        """Return what was kept, when the last pass is over."""
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
