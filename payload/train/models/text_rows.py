"""Packs the texts of a micro-batch into rows of about equal length, which need little padding.

B texts of at most T tokens, N tokens of all texts, R rows of L tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRows:
    """Texts packed into rows. A row holds several texts, one after the other."""

    tokens: Tensor
    """Shape (R, L), token ids."""
    starts: Tensor | None
    """Shape (R, L), see `CausalLM.hidden`; each padding token is a separate document. None if
    each row has one text."""
    last: Tensor
    """Shape (B,): index of each text's last token among all R x L tokens, in the order of the
    texts."""


def pack_texts(tokens: Tensor, lengths: Tensor, *, pad_token: int, width: int) -> TextRows:
    """Pack the first `lengths` (B,) tokens of each row of `tokens` (B, T) into fewer rows.

    The result depends only on the lengths and on the model's width.
    """
    sizes = lengths.tolist()
    if len(sizes) == 1:
        return TextRows(tokens=tokens[:, : sizes[0]], starts=None, last=lengths - 1)
    rows = cheapest_rows(sizes, width=width)
    length = max(sum(sizes[text] for text in row) for row in rows)
    begin = [0] * len(sizes)
    for number, row in enumerate(rows):
        place = number * length
        for text in row:
            begin[text], place = place, place + sizes[text]
    begins = torch.tensor(begin, device=tokens.device)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    is_text = columns < lengths[:, None]
    places = (begins[:, None] + columns)[is_text]
    packed = tokens.new_full((len(rows) * length,), pad_token)
    packed[places] = tokens[is_text]
    starts = torch.arange(length, device=tokens.device).repeat(len(rows))
    starts[places] = (begins % length).repeat_interleave(lengths)
    return TextRows(
        tokens=packed.view(len(rows), length),
        starts=starts.view(len(rows), length) if len(rows) < len(sizes) else None,
        last=begins + lengths - 1,
    )


def cheapest_rows(lengths: Sequence[int], *, width: int) -> list[list[int]]:
    """Return the indices of the texts in each row, for the number of rows with the lowest cost.

    A row of L tokens costs about L x (2 `width` + L): matmuls grow with L, and plain attention
    grows with the square of L. Kernels skip most of the attention between texts, which this
    estimate ignores. With kernels, attention costs little anyway.
    """
    powers = [2**power for power in range((len(lengths) - 1).bit_length())]

    def cost(rows: list[list[int]]) -> int:
        longest = max(sum(lengths[text] for text in row) for row in rows)
        return len(rows) * longest * (2 * width + longest)

    return min((balanced_rows(lengths, count) for count in (*powers, len(lengths))), key=cost)


def balanced_rows(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of the texts in each of `count` rows of about equal length.

    The longest remaining text goes into the shortest row (Graham's rule).
    """
    rows: list[list[int]] = [[] for _ in range(count)]
    by_length = [(0, number) for number in range(count)]
    for text in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length, number = by_length[0]
        rows[number].append(text)
        heapq.heapreplace(by_length, (length + lengths[text], number))
    return rows
