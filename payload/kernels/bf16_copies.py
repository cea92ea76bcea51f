"""Keeps bf16 copies of the parameters, which are made once after each update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Bf16Copies:
    """Keeps bf16 copies of weights until the next update. Autocast would make new copies in every
    forward pass."""

    def __init__(self) -> None:
        self._copies: dict[Tensor, Tensor] = {}
        self._keeps = True

    def keep_none(self) -> None:
        """From now on, make a new copy at each call of `of` and keep none."""
        self._keeps = False

    def of(self, parameter: Tensor | None) -> Tensor | None:
        """Return the parameter in bf16."""
        if parameter is None:
            return None
        copy = self._copies.get(parameter)
        if copy is None:
            # A copy made during an evaluation must also serve the next backward pass.
            with torch.inference_mode(False), torch.no_grad():
                copy = parameter.to(torch.bfloat16)
            if self._keeps:
                self._copies[parameter] = copy
        return copy

    def existing(self, parameter: Tensor) -> Tensor | None:
        """Return the copy of the parameter, or None. Code that writes the parameter must also write
        the copy."""
        return self._copies.get(parameter)

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Drop the copies of changed parameters. The next call of `of` makes new copies."""
        for parameter in parameters:
            self._copies.pop(parameter, None)
