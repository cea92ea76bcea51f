"""Tensor parallelism: each rank has some heads, and parts of the MLP and the vocabulary.

The input of a split layer is equal on all tensor ranks. The output is a sum over the tensor ranks,
so the output is also equal on all of them. Source: https://arxiv.org/abs/1909.08053 (Megatron-LM),
section 3.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

_MOST_SEED = 2**62


@dataclass(slots=True, eq=False)
class TensorRanks:
    """The ranks that split each layer."""

    group: dist.ProcessGroup
    index: int
    """Index of this rank in `group`."""
    size: int
    seconds: float = field(default=0.0, init=False)
    """Seconds spent in sums since the last reset to 0."""

    def sum(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Sum a contiguous tensor over the ranks, in place."""
        began_s = time.perf_counter()
        dist.all_reduce(values, op, group=self.group)
        self.seconds += time.perf_counter() - began_s
        return values


class SplitModule(nn.Module):
    """A module that can be split over several ranks."""

    ranks: TensorRanks | None = None
    """The ranks that split the module's parameters; None if each rank has all of the parameters."""


@dataclass(frozen=True, slots=True)
class Split:
    """The split of a parameter over the tensor ranks: each rank has a part of each section."""

    dim: int
    sections: tuple[int, ...] = (1,)
    """Relative sizes of the sections along `dim`, for a matrix with several sections, such as
    queries, keys and values."""

    def part(self, whole: Tensor, *, index: int, size: int) -> Tensor:
        """Return a contiguous copy of a rank's part."""
        return torch.cat(self.places(whole, index=index, size=size), self.dim)

    def part_shape(self, shape: tuple[int, ...], *, index: int, size: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of a tensor with the given shape."""
        rows = 0
        for length in self.lengths(shape):
            start, end = bounds(length, index=index, size=size)
            rows += end - start
        return (*shape[: self.dim], rows, *shape[self.dim + 1 :])

    def lengths(self, shape: tuple[int, ...]) -> list[int]:
        """Return the length of each section of a tensor of this shape."""
        unit = shape[self.dim] // sum(self.sections)
        return [each * unit for each in self.sections]

    def put(self, part: Tensor, whole: Tensor, *, index: int, size: int) -> None:
        """Copy a rank's part into the whole tensor."""
        places = self.places(whole, index=index, size=size)
        lengths = [each.shape[self.dim] for each in places]
        for place, each in zip(places, torch.split(part, lengths, self.dim), strict=True):
            place.copy_(each)

    def places(self, whole: Tensor, *, index: int, size: int) -> list[Tensor]:
        """Return views of a rank's part of each section."""
        found = []
        for section in torch.split(whole, self.lengths(tuple(whole.shape)), self.dim):
            start, end = bounds(section.shape[self.dim], index=index, size=size)
            found.append(section.narrow(self.dim, start, end - start))
        return found


@dataclass(frozen=True, slots=True)
class Splits:
    """The split of parameters over the tensor ranks. Each rank holds unsplit parameters in full."""

    parts: dict[str, Split]
    partial: frozenset[str] = frozenset()
    """Unsplit parameters for which the gradient on a rank covers only the rank's own heads."""


def bounds(length: int, *, index: int, size: int) -> tuple[int, int]:
    """Return the (begin, end) of a rank's part of `length` elements; last parts may be shorter."""
    each = -(-length // size)
    start = min(index * each, length)
    return start, min(start + each, length)


def copy_to_ranks(x: Tensor, ranks: TensorRanks | None) -> Tensor:
    """Return `x` as input of a split layer. The gradient of `x` is summed over the ranks."""
    if ranks is None:
        return x
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        # The following linears would cast x anyway; a cast here halves the bytes of the gradients'
        # sum.
        x = x.to(torch.get_autocast_dtype(kind))
    return cast(Tensor, _CopyToRanks.apply(x, ranks))


def reduce_from_ranks(x: Tensor, linear: nn.Linear, ranks: TensorRanks | None) -> Tensor:
    """Apply a split layer's last linear to this rank's inputs, and sum over the ranks."""
    if ranks is None:
        projected: Tensor = linear(x)
        return projected
    return sum_with_bias(functional.linear(x, linear.weight), linear.bias, ranks)


def sum_with_bias(x: Tensor, bias: Tensor | None, ranks: TensorRanks) -> Tensor:
    """Return the sum of x over the ranks, plus the bias."""
    total = cast(Tensor, _ReduceFromRanks.apply(x, ranks))
    return total if bias is None else total + bias.to(total.dtype)


def embed(weight: Tensor, tokens: Tensor, ranks: TensorRanks, *, vocab_rows: int) -> Tensor:
    """Look up `tokens` in an embedding of `vocab_rows` rows that is split over the ranks."""
    start, end = bounds(vocab_rows, index=ranks.index, size=ranks.size)
    is_elsewhere = (tokens < start) | (tokens >= end)
    own = functional.embedding((tokens - start).masked_fill(is_elsewhere, 0), weight)
    return sum_with_bias(own.masked_fill(is_elsewhere.unsqueeze(-1), 0), None, ranks)


@contextmanager
def own_masks(ranks: TensorRanks | None, *, dropout: float) -> Iterator[None]:
    """Draw different dropout masks on each rank inside the block, and equal masks after it.

    The ranks need different masks because each rank has its own heads. The generator's state is the
    same on all ranks after the block.
    """
    if ranks is None or not dropout:
        yield
        return
    seed = int(torch.randint(_MOST_SEED, ()))
    shared = torch.get_rng_state()
    torch.manual_seed(seed + ranks.index)
    try:
        yield
    finally:
        torch.set_rng_state(shared)


class _CopyToRanks(torch.autograd.Function):
    """Identity in the forward pass, sum over ranks in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Summed in a copy: autograd may pass the same gradient to a second function.
        return ctx.ranks.sum(grad.clone(memory_format=torch.contiguous_format)), None


class _ReduceFromRanks(torch.autograd.Function):
    """Sum over ranks in the forward pass, identity in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks.sum(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None
