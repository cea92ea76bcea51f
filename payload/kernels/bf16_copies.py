"""bf16 copies of the parameters, made once for each value that they have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Bf16Copies:
    """Autocast makes its copies in every pass; these last until the next update."""

    def __init__(self) -> None:
        self._copies: dict[Tensor, Tensor] = {}
        self._keeps = True

    def keep_none(self) -> None:
        """Make a copy each time that one is asked for, and hold on to none."""
        self._keeps = False

    def of(self, parameter: Tensor | None) -> Tensor | None:
        """The parameter in bf16."""
        if parameter is None:
            return None
        copy = self._copies.get(parameter)
        if copy is None:
            # What is made within an evaluation has to serve the next backward pass as well.
            with torch.inference_mode(False), torch.no_grad():
                copy = parameter.to(torch.bfloat16)
            if self._keeps:
                self._copies[parameter] = copy
        return copy

    def made(self, parameter: Tensor) -> Tensor | None:
        """The parameter's copy, if it has been asked for: who changes the one changes both."""
        return self._copies.get(parameter)

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Forget the copies of parameters that change; the next request makes new ones."""
        for parameter in parameters:
            self._copies.pop(parameter, None)
