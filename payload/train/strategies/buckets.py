"""Gradient buckets: the gradients that ranks exchange in one all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from payload.estimates.gradient_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES


class Bucket:
    """Some consecutive parameters, and a flat tensor that holds their gradients."""

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

    def gradient_view(self, parameter: Tensor) -> Tensor:
        """Return the view for a parameter's gradient; a gradient computed into it needs no copy."""
        return self._views[parameter]

    def move(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient into the bucket, where later micro-batches add to it."""
        assert parameter.grad is not None
        view = self.gradient_view(parameter)
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def take(self, parameter: nn.Parameter) -> bool:
        """Move a parameter's final gradient into the bucket.

        Returns True if the bucket now has all its gradients.
        """
        self.move(parameter)
        self._missing.remove(parameter)
        return not self._missing

    def complete(self) -> None:
        """Move the gradients of parameters that the last micro-batch did not use into the bucket.

        The gradient is zero for a parameter that no micro-batch used.
        """
        for parameter in tuple(self._missing):
            if parameter.grad is None:
                parameter.grad = self.gradient_view(parameter).zero_()
            self.take(parameter)

    def reset(self) -> None:
        """Mark every gradient as missing again."""
        assert not self._missing, "complete() is called before"
        self._missing = set(self.parameters)


def make_buckets(
    parameters: Iterable[nn.Parameter], *, first: nn.Parameter | None = None
) -> list[Bucket]:
    """Return buckets of all parameters, in the order in which a backward pass finishes them.

    `first`, if given, has a separate bucket before all others.
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
