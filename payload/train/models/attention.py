"""Causal attention of the plain modules: torch's SDPA, or FlashAttention by document on GPUs.

Shapes: B batch, T tokens of a row, H query heads, K key heads, D width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from payload.train.models.autocast import matmul_dtype
from payload.train.models.padding import final_single_tokens

_WIDEST_HEAD = 256
"""FlashAttention's limit on the width of a head, which must be a multiple of 8."""
_HALF = (torch.bfloat16, torch.float16)
_REFUSED_WIDTHS = range(193, 225)
"""Widths for which FlashAttention has no backward pass on some GPUs (compute capability 8.6 and
8.9)."""
_MOST_DOCUMENTS = 65_535
"""CUDA's limit on the part of a kernel's grid that counts the documents."""


@dataclass(frozen=True, slots=True)
class _Varlen:
    """torch's function, whose arguments differ between versions."""

    function: Callable[..., Tensor]
    options: dict[str, bool]


_VARLEN: _Varlen | None = None
"""Set by `load_varlen_attention`, because only runs on GPUs need the import."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    starts: Tensor | None = None,
    bounds: Tensor | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Return the attention (B, H, T, D) of queries (B, H, T, D) over at least T keys (B, K, ., D).

    The queries are the last T tokens. With a `window`, a token attends only to the last `window`
    tokens. `starts` is described in `CausalLM.hidden`. With `bounds` (see `document_bounds`) of the
    same documents, no mask is made, if the heads are in half precision and without dropout.
    """
    if bounds is not None and not dropout:
        heads = _in_half_precision(query, key, value)
        if heads is not None:
            return _attend_by_document(*heads, bounds=bounds, window=window, scale=scale)
    new, total = query.shape[2], key.shape[2]
    if starts is None:
        mask = visible(new, total, window=window, device=query.device)
    else:
        mask = documents_mask(starts, window=window)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and new > 1,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def visible(new: int, total: int, *, window: int | None, device: torch.device) -> Tensor | None:
    """Return which of `total` tokens each of the last `new` tokens attends to, (new, total).

    Return None if each token attends to all tokens up to itself and `new` is 1 or `total`: SDPA
    needs no mask in these cases.
    """
    reaches_all = window is None or window >= total
    if reaches_all and new in (1, total):
        return None
    mask = torch.ones(new, total, dtype=torch.bool, device=device).tril(diagonal=total - new)
    if window is not None and window < total:
        mask = mask.triu(diagonal=total - new - window + 1)
    return mask


def documents_mask(starts: Tensor, *, window: int | None = None) -> Tensor:
    """Return which tokens each token attends to, (B, 1, T, T) bool, from `starts` (B, T).

    A token attends to itself and to the earlier tokens of its document; with a window, only to the
    last `window` of these tokens.
    """
    length = starts.shape[1]
    places = torch.arange(length, device=starts.device)
    first = starts if window is None else starts.maximum(places - window + 1)
    within = (places >= first.unsqueeze(2)) & (places <= places.unsqueeze(1))
    return within.unsqueeze(1)


def document_bounds(starts: Tensor, *, joins_padding: bool = False) -> Tensor | None:
    """Return the index of each document's first token among all B x T tokens, and B x T, int32.

    Return None if there are too many documents for CUDA.

    With `joins_padding`, the padding of a row becomes one document, though each of its tokens is
    one in `starts`: kernels take time for each document. This is valid if no document that counts
    has a single token.
    """
    begins = starts == torch.arange(starts.shape[1], device=starts.device)
    if joins_padding:
        padding = final_single_tokens(starts)
        begins[:, 1:] &= ~(padding[:, 1:] & padding[:, :-1])
    first = begins.flatten().nonzero().flatten()
    if len(first) > _MOST_DOCUMENTS:
        return None
    return functional.pad(first, (0, 1), value=starts.numel()).int()


def _in_half_precision(*heads: Tensor) -> tuple[Tensor, ...] | None:
    """Return the heads in the dtype of matmuls, or None if FlashAttention does not support them."""
    dtype, width = matmul_dtype(heads[0]), heads[0].shape[-1]
    if dtype not in _HALF or width % 8 or width > _WIDEST_HEAD or width in _REFUSED_WIDTHS:
        return None
    return tuple(each.to(dtype) for each in heads)


def _attend_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bounds: Tensor,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Return the attention of queries (B, H, T, D) over keys of the same tokens (B, K, T, D)."""
    batch, _, length, _ = query.shape
    rows = tuple(each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    assert _VARLEN is not None, "the model uses it only after `load_varlen_attention`"
    mixed: Tensor = _VARLEN.function(
        *(*rows, bounds, bounds, length, length),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **_VARLEN.options,
    )
    return mixed.view(batch, length, *mixed.shape[1:]).transpose(1, 2)


def load_varlen_attention() -> bool:
    """Import torch's FlashAttention by document; return whether it is there, with windows."""
    global _VARLEN
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return False
    arguments = inspect.signature(varlen_attn).parameters
    if "window_size" not in arguments:
        return False
    # Versions without the flag need none for keys with fewer heads than queries.
    options = {"enable_gqa": True} if "enable_gqa" in arguments else {}
    function: Any = varlen_attn
    _VARLEN = _Varlen(function, options)
    return True
