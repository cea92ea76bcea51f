"""The experts of a mixture in bf16, as an autograd function over the kernels.

Each expert computes the tokens that the router assigned to the expert. The outputs are weighted and
summed in fp32. N tokens, C width, E experts, K experts of a token, M = N x K pairs of a token and
an expert, I width of a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from payload.kernels import decoder_pointwise as pointwise
from payload.kernels.decoder_pointwise import Gate
from payload.kernels.linears import Grads, LayerContext


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a token and one of its experts, sorted by expert."""

    order: Tensor
    """(M,) for each pair, its index in the list of pairs that is sorted by token."""
    tokens: Tensor
    """(M,) token of each pair."""
    counts: Sequence[int]
    """Number of pairs of each expert."""


def experts(
    x: Tensor,
    weights: Tensor,
    pairs: Pairs,
    stacks: tuple[Tensor, Tensor],
    gate: Gate,
    context: LayerContext,
) -> Tensor:
    """Return each token's weighted sum of expert outputs, (N, C) bf16.

    `x` (N, C) is bf16, `weights` (N, K) are the weights of the pairs, and `stacks` are the fp32
    matrices of gate and up (E, 2 I, C) and of the last linear (E, C, I).
    """
    made = _Experts.apply(x, weights, pairs, gate, context, *stacks)
    return cast(Tensor, made)


class _Experts(torch.autograd.Function):
    """Computes all experts; backward recomputes the product of gate and up."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        pairs: Pairs,
        gate: Gate,
        context: LayerContext,
        wide_stack: Tensor,
        down_stack: Tensor,
    ) -> Tensor:
        some = x[pairs.tokens]
        wide = _products(some, wide_stack, pairs)
        inner = pointwise.gated_forward(context.library, wide, gate)
        out = _products(inner, down_stack, pairs)
        chosen = weights.flatten()[pairs.order].float()
        ctx.save_for_backward(some, wide, chosen)
        ctx.pairs, ctx.gate, ctx.context = pairs, gate, context
        ctx.stacks, ctx.shape, ctx.kind = (wide_stack, down_stack), weights.shape, weights.dtype
        return _summed(out, pairs, rows=len(x), factors=chosen, context=context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Grads:
        some, wide, chosen = ctx.saved_tensors
        pairs, context, (wide_stack, down_stack) = ctx.pairs, ctx.context, ctx.stacks
        grads = grad[pairs.tokens]
        plain = _products(grads, down_stack, pairs, turned=False)
        # Without the weights, for these weights' own gradient.
        inner = (plain * chosen.unsqueeze(1)).to(torch.bfloat16)
        grad_wide = pointwise.gated_backward(context.library, wide, inner, ctx.gate)
        # `inner` now holds the input of the last linear.
        grad_chosen = (plain.float() * inner).sum(dim=1)
        grad_weights = torch.empty_like(grad_chosen)
        grad_weights[pairs.order] = grad_chosen
        if ctx.needs_input_grad[6]:
            scaled = (grads * chosen.unsqueeze(1)).to(torch.bfloat16)
            context.gradients.add_stack(down_stack, scaled, inner, pairs.counts)
        if ctx.needs_input_grad[5]:
            context.gradients.add_stack(wide_stack, grad_wide, some, pairs.counts)
        grad_x = None
        if ctx.needs_input_grad[0]:
            through = _products(grad_wide, wide_stack, pairs, turned=False)
            grad_x = _summed(through, pairs, rows=len(grad), factors=None, context=context)
        found = grad_weights.view(ctx.shape).to(ctx.kind) if ctx.needs_input_grad[1] else None
        return grad_x, found, None, None, None, None, None


def _products(x: Tensor, stack: Tensor, pairs: Pairs, *, turned: bool = True) -> Tensor:
    """Return x (M, ...) times each pair's matrix in bf16; `turned` transposes the matrices."""
    columns = stack.shape[1 if turned else 2]
    made = x.new_empty(len(x), columns)
    rows = list(pairs.counts)
    parts = zip(torch.split(x, rows), torch.split(made, rows), strict=True)
    for number, (some, out) in enumerate(parts):
        if len(some):
            matrix = stack[number].detach().to(torch.bfloat16)
            torch.mm(some, matrix.t() if turned else matrix, out=out)
    return made


def _summed(
    rows_of_pairs: Tensor,
    pairs: Pairs,
    *,
    rows: int,
    factors: Tensor | None,
    context: LayerContext,
) -> Tensor:
    """Return the sum of each token's pairs in bf16, (N, C), summed in fp32."""
    values = rows_of_pairs.float()
    if factors is not None:
        values = values.mul_(factors.unsqueeze(1))
    total = torch.zeros(rows, values.shape[1])
    context.library.add_rows(total, pairs.tokens, values)
    return total.to(torch.bfloat16)
