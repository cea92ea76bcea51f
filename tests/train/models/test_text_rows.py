"""Texts in rows: each text is there once, as a document, and little is padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from payload.train.models.text_rows import TextRows, balanced_rows, pack_texts

PAD, WIDTH = 0, 576


def packed(lengths: list[int]) -> tuple[list[list[int]], TextRows]:
    """Return texts of these lengths, whose tokens all differ, and their rows."""
    longest = max(lengths)
    tokens = torch.full((len(lengths), longest), PAD)
    texts, first = [], 1
    for row, length in enumerate(lengths):
        texts.append(list(range(first, first + length)))
        tokens[row, :length] = torch.tensor(texts[-1])
        first += length
    return texts, pack_texts(tokens, torch.tensor(lengths), pad_token=PAD, width=WIDTH)


@pytest.mark.parametrize("seed", range(8))
def test_every_text_is_there_once_as_a_document(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 40))
    lengths = np.clip(draw.lognormal(2, 1, count).astype(int), 1, 200).tolist()
    texts, rows = packed(lengths)
    size = rows.tokens.shape[1]
    starts = torch.zeros_like(rows.tokens) if rows.starts is None else rows.starts
    seen = torch.zeros(rows.tokens.numel(), dtype=torch.bool)
    for text, last in zip(texts, rows.last.tolist(), strict=True):
        places = slice(last + 1 - len(text), last + 1)
        assert rows.tokens.flatten()[places].tolist() == text
        assert set(starts.flatten()[places].tolist()) == {places.start % size}
        assert places.start // size == last // size
        seen[places] = True
    assert int(seen.sum()) == sum(lengths)
    assert (rows.tokens.flatten()[~seen] == PAD).all()
    if rows.starts is not None:
        own = torch.arange(rows.tokens.numel()) % size
        assert torch.equal(starts.flatten()[~seen], own[~seen])


def test_packed_texts_never_have_more_tokens_than_padded_ones() -> None:
    draw = np.random.default_rng(0)
    for count in range(1, 70):
        lengths = np.clip(draw.lognormal(3, 1, count).astype(int), 1, 512).tolist()
        _, rows = packed(lengths)
        assert rows.tokens.numel() <= count * max(lengths)


def test_short_texts_of_mixed_lengths_are_nearly_without_padding() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(2.6, 0.5, 64).astype(int), 3, 64).tolist()
    _, rows = packed(lengths)
    assert rows.tokens.numel() <= 1.03 * sum(lengths) < 0.5 * len(lengths) * max(lengths)
    assert len(rows.tokens) > 1  # Plain attention computes the square of a row's length.


def test_texts_of_one_length_have_a_row_each_and_no_starts() -> None:
    texts, rows = packed([9] * 5)
    assert rows.starts is None and sorted(rows.tokens.tolist()) == texts


def test_rows_are_filled_evenly_from_the_longest_text_on() -> None:
    assert balanced_rows([3, 9, 4, 5, 4], 2) == [[1, 4], [3, 2, 0]]
