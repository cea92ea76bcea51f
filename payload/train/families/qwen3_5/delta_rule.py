"""The gated delta rule of linear attention, by matmuls over chunks of 64 tokens.

A head's state S (K, V) maps keys to values. Each token decays the state, moves the state's value at
the token's key towards the token's value, and reads the state with the token's query:

    S = exp(g) S;  S = S + k (sigmoid(w) (v - k S));  o = q S

Queries and keys have length 1, and queries are divided by the root of K. Within a chunk, the steps
are one triangular system (https://arxiv.org/abs/2412.06464, section 3.3), so the loop over chunks
carries only the state. Lengths, decays and write strengths scale rows and columns of the products,
so the matmuls read queries, keys and values as they are.

Decays, the triangular inverse and the state are fp32. The matmuls with keys, values and states have
the dtype of the queries, as under autocast.

Shapes: B batch, T tokens, N chunks, C tokens of a chunk, H heads of values, K and V widths of keys
and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from payload.models.qwen3_5.spec import CHUNK

_EPS = 1e-6
"""Added to the squared length of queries and keys."""
_SMALLEST_LOG = -30.0
"""A decay below exp(-30) = 1e-13 counts as 0, because rounding errors are larger. With numbers near
fp32's smallest ones, CPUs compute a hundred times slower."""

Grads = tuple[Tensor | None, ...]


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    write: Tensor,
    decay: Tensor,
    *,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, T, H, V), and the state after the last token, (B, H, K, V) fp32.

    `query` and `key` are (B, T, G, K). Each of the G heads serves H / G consecutive heads of
    `value` (B, T, H, V). `write` (B, T, H) are the logits w of the write strengths, and
    `decay` (B, T, H) the logarithms g of the decays. `state` continues earlier tokens.
    `CausalLM.hidden` describes `starts` (B, T): each document begins with an empty state. The
    returned state has no gradient.
    """
    with torch.autocast(query.device.type, enabled=False):
        documents = _documents(starts, length=query.shape[1], device=query.device)
        inputs = query, key, value, write.float(), decay.float()
        made = _GatedDeltaRule.apply(*inputs, documents, state)
    return cast("tuple[Tensor, Tensor]", made)


def one_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    write: Tensor,
    decay: Tensor,
    *,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same as `gated_delta_rule` for T = 1, without a chunk."""
    heads = value.shape[2]
    wide = (_repeated(each, heads).squeeze(1).float() for each in (query, key, value))
    q, k, v = (each.unsqueeze(-2) for each in wide)
    q = q * _rows(_inverse_length(q)) * q.shape[-1] ** -0.5
    k = k * _rows(_inverse_length(k))
    if state is None:
        state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    state = state * decay.float().exp().transpose(1, 2).unsqueeze(-1)
    new = write.float().sigmoid().transpose(1, 2).unsqueeze(-1) * (v - k @ state)
    state = state + k.mT @ new
    return (q @ state).transpose(1, 2).to(query.dtype), state


@dataclass(frozen=True, slots=True)
class _Documents:
    """Masks that show which tokens of a chunk are in the same document. A chunk has C tokens."""

    within: Tensor
    """True if the column's token is in the row's document and not after it: (N, B, 1, C, C), or
    (C, C) for one document in each row."""
    continues: Tensor | None
    """True if a token's document began before the chunk: (N, B, 1, C). None = True for all tokens.
    """


@dataclass(frozen=True, slots=True)
class _Scales:
    """Factors of rows and columns, (N, B, H, C) fp32 each."""

    query: Tensor
    key: Tensor
    write: Tensor
    carried: Tensor
    """The decay from the chunk's start to a token; 0 if the token's document began later."""
    left: Tensor
    """The decay from a token to the chunk's end; 0 if the token's document ended earlier."""
    between: Tensor
    """The decay from the column's token to the row's token: (N, B, H, C, C)."""

    def ended(self) -> Tensor:
        """Return the decay of the state over each chunk, (N, B x H, 1, 1)."""
        return self.carried[..., -1].flatten(1)[..., None, None]


class _GatedDeltaRule(torch.autograd.Function):
    """Computes the gated delta rule. The backward pass recomputes the states of all chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        write: Tensor,
        decay: Tensor,
        documents: _Documents,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        heads, length = value.shape[2], value.shape[1]
        q, k = (_chunks(_repeated(each, heads)) for each in (query, key))
        v, w, g = _chunks(value), _chunks(write), _chunks(decay)
        scales = _scales(q, k, w, g, documents)
        inverse = _inverse(k, scales).to(q.dtype)
        last, states, new = _scan(k, v, inverse, scales, _first_state(state, q, v))
        out = _rows(scales.query * scales.carried) * _matmul(q, states)
        out += _matmul(_attention(q, k, scales), new)
        ctx.save_for_backward(q, k, v, w, g, inverse, state)
        ctx.documents, ctx.groups, ctx.length = documents, key.shape[2], length
        result = _tokens(out, length).to(q.dtype)
        ctx.mark_non_differentiable(last)
        return result, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Grads:
        q, k, v, w, g, inverse, state = ctx.saved_tensors
        scales = _scales(q, k, w, g, ctx.documents)
        _, states, new = _scan(k, v, inverse, scales, _first_state(state, q, v))
        found = _gradients(_chunks(grad), q, k, v, inverse, states, new, scales, ctx.documents)
        grads = [_tokens(each, ctx.length) for each in found]
        summed = [_summed(each, ctx.groups) for each in grads[:2]]
        return *summed, *grads[2:], None, None


def _documents(starts: Tensor | None, *, length: int, device: torch.device) -> _Documents:
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).tril()
    if starts is None:
        return _Documents(lower, None)
    # The tokens that fill the last chunk continue the last document.
    filled = torch.cat((starts, starts[:, -1:].expand(-1, -length % CHUNK)), dim=1)
    chunks = filled.view(len(starts), -1, CHUNK).transpose(0, 1).unsqueeze(2)
    first = torch.arange(0, filled.shape[1], CHUNK, device=device).view(-1, 1, 1, 1)
    within = (chunks.unsqueeze(-1) == chunks.unsqueeze(-2)) & lower
    return _Documents(within, chunks < first)


def _scales(q: Tensor, k: Tensor, w: Tensor, g: Tensor, documents: _Documents) -> _Scales:
    within = documents.within
    # A sum over the document alone: a difference of longer sums would depend on other documents.
    total = (within.to(g.dtype) @ g.unsqueeze(-1)).squeeze(-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    kept = (between >= _SMALLEST_LOG) & within
    between = between.clamp_(_SMALLEST_LOG, 0).exp_().mul_(kept.to(g.dtype))
    carried = total.clamp(min=_SMALLEST_LOG).exp() * (total >= _SMALLEST_LOG)
    if documents.continues is not None:
        carried = carried * documents.continues
    return _Scales(
        query=_inverse_length(q) * q.shape[-1] ** -0.5,
        key=_inverse_length(k),
        write=w.sigmoid(),
        carried=carried,
        left=between[..., -1, :],
        between=between,
    )


def _inverse(k: Tensor, scales: _Scales) -> Tensor:
    """Return the inverse of the triangular system, (N, B, H, C, C) fp32."""
    system = _overlaps(k, scales)
    one = torch.eye(CHUNK, dtype=system.dtype, device=system.device).expand_as(system)
    found: Tensor = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
    return found


def _overlaps(k: Tensor, scales: _Scales) -> Tensor:
    """Return the triangular system's entries below the diagonal: scaled products of keys."""
    found = _matmul(k, k.mT) * _rows(scales.write * scales.key)
    return found.mul_(_columns(scales.key)).mul_(scales.between).tril_(-1)


def _attention(q: Tensor, k: Tensor, scales: _Scales) -> Tensor:
    """Return the weights with which each token reads the new values of the token's chunk.

    The result has the queries' dtype.
    """
    found = _matmul(q, k.mT) * _rows(scales.query)
    return found.mul_(_columns(scales.key)).mul_(scales.between).to(q.dtype)


def _scan(
    k: Tensor, v: Tensor, inverse: Tensor, scales: _Scales, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last state, the state before each chunk (N, B, H, K, V), and the new values.

    The state before a chunk already predicts a part of the values; only the rest is new.
    """
    written, read = _readers(inverse, scales)
    new, reading = _matmul(written, v).flatten(1, 2), _matmul(read, k).flatten(1, 2)
    keys, kept = k.flatten(1, 2), _rows(scales.left * scales.key).flatten(1, 2)
    ended = scales.ended()
    states = k.new_empty((len(k), *state.shape))
    for number, before in enumerate(states):
        before.copy_(state)
        new[number].baddbmm_(reading[number], before, alpha=-1)
        state = state * ended[number]
        state += torch.bmm(keys[number].mT, (new[number] * kept[number]).to(k.dtype))
    return state.view(k.shape[1:3] + state.shape[1:]), _heads(states, k), _heads(new, k)


def _readers(inverse: Tensor, scales: _Scales) -> tuple[Tensor, Tensor]:
    """Return the matrices that map values and keys to new values and to readers of the state."""
    written = inverse * _columns(scales.write)
    read = written * _columns(scales.carried * scales.key)
    return written.to(inverse.dtype), read.to(inverse.dtype)


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse: Tensor,
    states: Tensor,
    new: Tensor,
    scales: _Scales,
    documents: _Documents,
) -> tuple[Tensor, ...]:
    """Return the gradients of the five inputs of the rule, in chunks.

    A variable that starts with `log_` is the gradient of the logarithm of a factor.
    """
    written, read = _readers(inverse, scales)
    scaled = (grad * _rows(scales.query * scales.carried)).to(q.dtype)
    reading = _matmul(scaled, states.mT)
    left = scales.left * scales.key
    grad_new, ends, log_ended = _scan_backward(
        _matmul(_attention(q, k, scales).mT, grad),
        _matmul(q.mT, scaled),
        k,
        _matmul(read, k),
        states,
        scales,
    )
    storing = _matmul((new * _rows(left)).to(k.dtype), ends.mT)
    grad_reader = _matmul(grad_new, states.mT).neg_()
    grad_written, grad_read = _matmul(grad_new, v.mT).float(), _matmul(grad_reader, k.mT).float()
    grad_inverse = grad_written * _columns(scales.write)
    grad_inverse += grad_read * _columns(scales.write * scales.carried * scales.key)
    log_read = (grad_read * read).sum(-2)
    log_written = (grad_written * written).sum(-2) + log_read
    transposed = inverse.mT
    grad_system = _matmul(_matmul(transposed, grad_inverse.to(q.dtype)), transposed)
    by_keys, rows, columns, _ = _product_gradient(
        grad_system.neg_().tril_(-1), _matmul(k, k.mT), scales.write * scales.key, scales
    )
    by_queries, rows_of_queries, columns_of_queries, own = _product_gradient(
        _matmul(grad, new.mT), _matmul(q, k.mT), scales.query, scales
    )
    by_keys, by_queries = (by_keys + by_keys.mT).to(k.dtype), by_queries.to(k.dtype)
    log_reading, log_left = _dot(reading, q), _dot(storing, k)
    columns += columns_of_queries
    log_key = columns + own + rows + log_read + log_left
    log_query = rows_of_queries + own + log_reading
    # A token is not decayed to itself, nor the last token to the chunk's end.
    log_left[..., -1] = 0
    log_total = rows_of_queries + rows - columns + log_read + log_reading - log_left
    log_total[..., -1] += log_left.sum(-1) + log_ended
    length = _inverse_length(q)
    grad_q = reading.float() - q * _rows(log_query * length.square())
    grad_q += _matmul(by_queries, k)
    grad_k = storing.float() - k * _rows(log_key * scales.key.square())
    grad_k += _matmul(read.mT, grad_reader)
    grad_k += _matmul(by_keys, k)
    grad_k += _matmul(by_queries.mT, q)
    within = documents.within.to(log_total.dtype)
    return (
        grad_q.to(q.dtype),
        grad_k.to(k.dtype),
        _matmul(written.mT, grad_new),
        (rows + log_written) * (1 - scales.write),
        (within.mT @ log_total.unsqueeze(-1)).squeeze(-1),
    )


def _scan_backward(
    grad_new: Tensor,
    grad_states: Tensor,
    k: Tensor,
    readers: Tensor,
    states: Tensor,
    scales: _Scales,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the new values and of each chunk's last state.

    The third result is the gradient of the logarithm of the state's decay over each chunk.
    `grad_new` and `grad_states` are the parts of the gradients that come from the outputs.
    """
    shape = grad_new.shape
    parts = (grad_new, grad_states, k, readers, states)
    grad_new, grad_states, keys, readers, starts = (each.flatten(1, 2) for each in parts)
    left, ended = _rows(scales.left * scales.key).flatten(1, 2), scales.ended()
    ends, log_ended = torch.empty_like(grad_states), ended.new_empty(ended.shape[:2])
    state = torch.zeros_like(grad_states[0], dtype=torch.float32)
    for number in reversed(range(len(k))):
        ends[number] = state
        torch.mul(state, ended[number], out=state)
        log_ended[number] = (state * starts[number]).sum((-2, -1))
        grad_new[number] += torch.bmm(keys[number], ends[number]) * left[number]
        state += grad_states[number]
        state -= torch.bmm(readers[number].mT, grad_new[number])
    return grad_new.view(shape), _heads(ends, k), log_ended.view(k.shape[:3])


def _product_gradient(
    grad: Tensor, product: Tensor, row: Tensor, scales: _Scales
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of a product whose rows and columns are scaled, and of the scales.

    The second result is the gradient of the logarithm of each row's scale. The third result is the
    same for columns. Both leave out the diagonal. The diagonal's part is the last result.
    """
    scaled = grad * _rows(row)
    scaled *= _columns(scales.key)
    scaled *= scales.between
    of_logs = scaled * product
    diagonal = of_logs.diagonal(dim1=-2, dim2=-1)
    own = diagonal.clone()
    diagonal.zero_()
    return scaled, of_logs.sum(-1), of_logs.sum(-2), own


def _first_state(state: Tensor | None, q: Tensor, v: Tensor) -> Tensor:
    """Return the state before the first chunk, (B x H, K, V) fp32."""
    if state is not None:
        return state.float().flatten(0, 1)
    heads = q.shape[1] * q.shape[2]
    return q.new_zeros((heads, q.shape[-1], v.shape[-1]), dtype=torch.float32)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of x (B, T, G, K) for the heads of values that it serves."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def _summed(grad: Tensor, groups: int) -> Tensor:
    """Return the gradient of `_repeated`'s input, with `groups` heads."""
    if grad.shape[2] == groups:
        return grad
    return grad.view(*grad.shape[:2], groups, -1, *grad.shape[3:]).sum(3)


def _chunks(x: Tensor) -> Tensor:
    """Reshape (B, T, H, ...) to (N, B, H, C, ...), with zeros after the last token."""
    fill = -x.shape[1] % CHUNK
    if fill:
        x = functional.pad(x, (0, 0) * (x.dim() - 2) + (0, fill))
    chunks = x.view(x.shape[0], -1, CHUNK, *x.shape[2:])
    return chunks.movedim(1, 0).transpose(2, 3).contiguous()


def _tokens(x: Tensor, length: int) -> Tensor:
    """Reshape (N, B, H, C, ...) to (B, T, H, ...)."""
    return x.transpose(2, 3).movedim(0, 1).flatten(1, 2)[:, :length]


def _heads(x: Tensor, like: Tensor) -> Tensor:
    """Reshape (N, B x H, ...) to (N, B, H, ...)."""
    return x.view(x.shape[0], *like.shape[1:3], *x.shape[2:])


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the matrices in the last two dimensions, as one batch."""
    found = torch.bmm(a.flatten(0, 2), b.flatten(0, 2))
    return found.view(*a.shape[:3], *found.shape[1:])


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot products of rows, (N, B, H, C) fp32."""
    return (a.float() * b).sum(-1)


def _rows(scale: Tensor) -> Tensor:
    return scale.unsqueeze(-1)


def _columns(scale: Tensor) -> Tensor:
    return scale.unsqueeze(-2)


def _inverse_length(x: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return torch.rsqrt(length.square() + _EPS)
