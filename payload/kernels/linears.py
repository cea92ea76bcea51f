"""Joins linear layers that have the same input: in bf16, they are one matmul.

In fp32, each weight has a separate matmul, which reads or writes the weight's columns of the joined
tensor. One joint matmul would need a copy of the weights. The layers are trained, or frozen with
adapters.

N tokens, I inputs, O outputs of all layers together, R ranks of all their adapters together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from payload.kernels.accumulate import WeightGradients
from payload.kernels.bf16_copies import Bf16Copies
from payload.kernels.library import Library

Grads = tuple[Tensor | None, ...]
Kept = tuple[Tensor | None, Tensor | None]
"""Activations between the low-rank matrices, (N, R), and dropout's masks of kept elements, (A, N,
I) bool for A adapters. Without adapters or dropout: None."""
_NOTHING: Kept = (None, None)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The objects that the layer functions need."""

    library: Library
    copies: Bf16Copies
    gradients: WeightGradients
    dtype: torch.dtype = torch.bfloat16
    """The dtype of matmuls and of the activations between them: bf16 or fp32."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter: `scale * second(first(x))` is added to its linear's output."""

    first: Tensor
    """The first low-rank matrix: (rank, inputs) fp32."""
    second: Tensor
    """The second low-rank matrix: (outputs, rank) fp32."""
    scale: float
    dropout: float = 0.0
    """Share of the input's elements that are dropped before the adapter."""


@dataclass(frozen=True, slots=True)
class Projection:
    """The parameters of a linear layer; a frozen layer can have an adapter."""

    weight: Tensor
    """The weight matrix: (outputs, inputs) fp32. A frozen weight can be bf16."""
    bias: Tensor | None
    adapter: LowRank | None = None


class Linears(ABC):
    """Linear layers with the same input; their outputs are concatenated."""

    parameters: tuple[Tensor | None, ...]
    """Inputs of the autograd function; `backward` returns a gradient or None for each of them."""
    keeps_input: bool
    """True if `backward` needs the input."""

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        """Return the output (N, O) for x (N, I), and the adapters' tensors that backward needs."""

    @abstractmethod
    def input_gradient(
        self, grad: Tensor, kept: Kept, *, needed: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the input (N, I) and of the tensor between low-rank matrices.

        `grad` is the gradient of the output (N, O), and `kept` is from `forward`. The input's
        gradient is empty if `needed` is False.
        """

    @abstractmethod
    def backward(self, grad: Tensor, x: Tensor, kept: Kept, grad_low: Tensor | None) -> Grads:
        """Add the weights' gradients to their memory; return the gradients of `parameters`.

        `kept` is from `forward`, and `grad_low` is the second result of `input_gradient`.
        """


def join(
    projections: Sequence[Projection], context: LayerContext, *, keeps_copies: bool = False
) -> Linears:
    """Join layers that are all trained or all frozen.

    With `keeps_copies`, the bf16 weights of trained layers are kept until the next update.
    """
    if projections[0].weight.requires_grad:
        return _Trained(projections, context, keeps_copies=keeps_copies)
    return _Frozen(projections, context)


class _Trained(Linears):
    """Trained layers. The bf16 weights are concatenated by rows.

    If copies are not kept, the bf16 weights are made for each matmul: rounding takes a hundredth of
    the matmul's time for 4 x 1024 tokens, while copies of all weights would take 2 bytes per
    parameter.
    """

    keeps_input = True

    def __init__(
        self, projections: Sequence[Projection], context: LayerContext, *, keeps_copies: bool
    ) -> None:
        assert not (keeps_copies and len(projections) > 1), "copies exist only for single weights"
        self._context, self._keeps_copies = context, keeps_copies
        self._weights = tuple(each.weight for each in projections)
        self._biases = tuple(each.bias for each in projections if each.bias is not None)
        self.parameters = tuple(
            parameter for each in projections for parameter in (each.weight, each.bias)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        if x.dtype is torch.float32:
            return _outputs(x, self._weights, self._biases), _NOTHING
        bias = self._joined(self._biases) if self._biases else None
        return functional.linear(x, self._joined(self._weights), bias), _NOTHING

    def input_gradient(
        self, grad: Tensor, kept: Kept, *, needed: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        if not needed:
            return grad.new_empty(0), None
        if grad.dtype is torch.float32:
            return _input_gradient(grad, self._weights), None
        return torch.mm(grad, self._joined(self._weights)), None

    def backward(self, grad: Tensor, x: Tensor, kept: Kept, grad_low: Tensor | None) -> Grads:
        self._context.gradients.add_joined(self._weights, grad, x)
        if not self._biases:
            return (None,) * len(self.parameters)
        rows = [len(each) for each in self._weights]
        sums = torch.split(self._context.library.sum_rows(grad), rows)
        return tuple(each for bias in sums for each in (None, bias))

    def _joined(self, parameters: tuple[Tensor, ...]) -> Tensor:
        copy = self._context.copies.of(parameters[0]) if self._keeps_copies else None
        return join_rows(parameters) if copy is None else copy


class _Frozen(Linears):
    """Frozen layers. The adapters' low-rank matrices are also joined.

    The first matrices of all adapters are concatenated by rows, (R, I). The second matrices,
    multiplied by their scales, are blocks of a matrix (O, R) that is zero outside the blocks.
    """

    def __init__(self, projections: Sequence[Projection], context: LayerContext) -> None:
        self._context, self._projections = context, projections
        self._weights = tuple(each.weight for each in projections)
        self._adapters = [each.adapter for each in projections if each.adapter is not None]
        self._blocks: list[tuple[LowRank, slice, slice]] = []
        """Each adapter with its rows and columns of the joined second matrix."""
        row = column = 0
        for each in projections:
            outputs = len(each.weight)
            if each.adapter is not None:
                ranks = slice(column, column + len(each.adapter.first))
                self._blocks.append((each.adapter, slice(row, row + outputs), ranks))
                column = ranks.stop
            row += outputs
        self._sizes = row, column
        self._dropout = self._adapters[0].dropout if self._adapters else 0.0
        self.keeps_input = bool(self._adapters)
        self.parameters = tuple(
            matrix for each in self._adapters for matrix in (each.first, each.second)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        biases = tuple(each.bias for each in self._projections if each.bias is not None)
        if x.dtype is torch.float32:
            result = _outputs(x, self._weights, biases)
        else:
            joined = join_rows(biases) if biases else None
            result = functional.linear(x, join_rows(self._weights), joined)
        if not self._adapters:
            return result, _NOTHING
        masks = self._draw_masks(x)
        if masks is None:
            low = torch.mm(x, self._first().t())
        else:
            parts = [
                torch.mm(self._dropped(x, mask), self._rows((each.first,)).t())
                for each, mask in zip(self._adapters, masks, strict=True)
            ]
            low = torch.cat(parts, dim=1)
        return result.addmm_(low, self._second().t()), (low, masks)

    def input_gradient(
        self, grad: Tensor, kept: Kept, *, needed: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        masks = kept[1]
        grad_low = torch.mm(grad, self._second()) if self._adapters else None
        if not needed:
            return grad.new_empty(0), grad_low
        if grad.dtype is torch.float32:
            found = _input_gradient(grad, self._weights)
        else:
            found = torch.mm(grad, join_rows(self._weights))
        if grad_low is None:
            return found, None
        if masks is None:
            return found.addmm_(grad_low, self._first()), grad_low
        for (each, _, ranks), mask in zip(self._blocks, masks, strict=True):
            through = torch.mm(grad_low[:, ranks], self._rows((each.first,)))
            found.add_(self._dropped(through, mask))
        return found, grad_low

    def backward(self, grad: Tensor, x: Tensor, kept: Kept, grad_low: Tensor | None) -> Grads:
        low, masks = kept
        if low is None or grad_low is None:
            return (None,) * len(self.parameters)
        gradients = self._context.gradients
        if masks is None:
            gradients.add_joined([each.first for each in self._adapters], grad_low, x)
        else:
            for (each, _, ranks), mask in zip(self._blocks, masks, strict=True):
                part = grad_low[:, ranks].contiguous()
                gradients.add(each.first, part, self._dropped(x, mask))
        # Only the blocks with rank and output of the same adapter are needed.
        every = torch.empty(low.shape[1], grad.shape[1])
        gradients.compute(low, grad, every, add=False)
        for adapter, rows, ranks in self._blocks:
            gradients.add_made(adapter.second, every[ranks, rows].t(), adapter.scale)
        return (None,) * len(self.parameters)

    def _draw_masks(self, x: Tensor) -> Tensor | None:
        """Draw the adapters' dropout masks like torch's dropout, in the plain layers' order."""
        if not self._dropout:
            return None
        masks = torch.empty(len(self._adapters), *x.shape, dtype=torch.bool)
        for mask in masks:
            mask.bernoulli_(1 - self._dropout)
        return masks

    def _dropped(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask).div_(1 - self._dropout)

    def _rows(self, parameters: Sequence[Tensor]) -> Tensor:
        return join_rows(parameters, dtype=self._context.dtype)

    def _first(self) -> Tensor:
        return self._rows(tuple(each.first for each in self._adapters))

    def _second(self) -> Tensor:
        joined = torch.zeros(self._sizes, dtype=self._context.dtype)
        for adapter, rows, ranks in self._blocks:
            joined[rows, ranks] = adapter.second.detach() * adapter.scale
        return joined


def _outputs(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Return the outputs (N, O) for x (N, I) fp32; there are as many biases as weights, or none."""
    rows = [len(each) for each in weights]
    result = x.new_empty(len(x), sum(rows))
    for number, part in enumerate(torch.split(result, rows, dim=1)):
        weight = weights[number].detach().t()
        if biases:
            torch.addmm(biases[number].detach(), x, weight, out=part)
        else:
            torch.mm(x, weight, out=part)
    return result


def _input_gradient(grad: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient of the input (N, I) from the gradient of the outputs (N, O), in fp32."""
    parts = torch.split(grad, [len(each) for each in weights], dim=1)
    found = torch.mm(parts[0], weights[0].detach())
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        found.addmm_(part, weight.detach())
    return found


def join_rows(parameters: Sequence[Tensor], *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the rows of all parameters as one tensor, without a copy if they are adjacent."""
    first = parameters[0].detach()
    if first.dtype is dtype and _are_adjacent(parameters):
        size = (sum(len(each) for each in parameters), *first.shape[1:])
        return first.as_strided(size, first.stride())
    rows = [len(each) for each in parameters]
    joined = first.new_empty((sum(rows), *first.shape[1:]), dtype=dtype)
    for each, part in zip(parameters, torch.split(joined, rows), strict=True):
        part.copy_(each.detach())
    return joined


def make_adjacent(parameters: Sequence[Tensor]) -> None:
    """Round frozen parameters to bf16 in adjacent memory, so that `join_rows` needs no copy."""
    joined = join_rows(parameters)
    parts = torch.split(joined, [len(each) for each in parameters])
    for each, part in zip(parameters, parts, strict=True):
        each.data = part


def _are_adjacent(parameters: Sequence[Tensor]) -> bool:
    """Return whether each parameter begins where the previous one ends, in one storage."""
    storage, end = parameters[0].untyped_storage().data_ptr(), parameters[0].storage_offset()
    for each in parameters:
        is_next = each.untyped_storage().data_ptr() == storage and each.storage_offset() == end
        if not (is_next and each.dtype is parameters[0].dtype and each.is_contiguous()):
            return False
        end += each.numel()
    return True
