"""Gradients in buckets: what travels together between the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from payload.estimates.gradient_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES


class Bucket:
    """Neighbouring parameters, and one flat tensor for their gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        size = sum(each.numel() for each in parameters)
        self.flat = torch.zeros(size, device=parameters[0].device)
        parts = torch.split(self.flat, [each.numel() for each in parameters])
        self._views: dict[Tensor, Tensor] = {
            parameter: part.view_as(parameter)
            for parameter, part in zip(parameters, parts, strict=True)
        }
        self._missing = set(self.parameters)

    def place(self, parameter: Tensor) -> Tensor:
        """Where the gradient of one of `parameters` belongs; made there, it need not be moved."""
        return self._views[parameter]

    def move(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient here, where autograd adds those of later passes to it."""
        assert parameter.grad is not None
        view = self.place(parameter)
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def take(self, parameter: nn.Parameter) -> bool:
        """Move a parameter's whole gradient here; whether it was the last one missing."""
        self.move(parameter)
        self._missing.remove(parameter)
        return not self._missing

    def complete(self) -> None:
        """Take what the last pass left out: a gradient of earlier passes, or one of zeros."""
        for parameter in tuple(self._missing):
            if parameter.grad is None:
                parameter.grad = self.place(parameter).zero_()
            self.take(parameter)

    def reset(self) -> None:
        """Every gradient is missing again."""
        assert not self._missing, "complete() is called before"
        self._missing = set(self.parameters)


def make_buckets(
    parameters: Iterable[nn.Parameter], *, first: nn.Parameter | None = None
) -> list[Bucket]:
    """All parameters, in the order in which a backward pass finishes them: the last one first.

    `first` comes before all others, in a bucket of its own.
    """
    others = [parameter for parameter in parameters if parameter is not first]
    buckets = [Bucket(group) for group in _groups(reversed(others))]
    return buckets if first is None else [Bucket([first]), *buckets]


def _groups(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    group: list[nn.Parameter] = []
    limit, size = FIRST_BUCKET_BYTES, 0
    for parameter in parameters:
        group.append(parameter)
        size += parameter.numel() * 4
        if size >= limit:
            yield group
            group, limit, size = [], BUCKET_BYTES, 0
    if group:
        yield group
