"""Encoded batches into the store: ends of documents, the split, the counts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from payload.data.documents import Batch
from payload.data.encode import Encoded
from payload.data.plan import DTYPE
from payload.data.split import Split
from payload.data.store import Store
from payload.data.tokenizer import END_OF_TEXT

EXAMPLES_KEPT = 20
"""Complaints about bad documents that meta.json carries."""


def write_batch(store: Store, batch: Batch, encoded: Encoded, split: Split) -> None:
    """Append one batch's tokens to the right files and count them."""
    ends = np.array(batch.ends, dtype=np.bool_)
    is_val = split.val_mask(np.array(batch.numbers, dtype=np.int64))
    tokens, offsets = with_ends(encoded, ends)
    # Neighbours that go to the same file are written together.
    edges = [0, *(np.flatnonzero(is_val[1:] != is_val[:-1]) + 1).tolist(), len(is_val)]
    for start, end in pairwise(edges):
        if start < end:
            store.append(tokens[offsets[start] : offsets[end]], is_val=bool(is_val[start]))
    lengths = np.diff(offsets)
    totals = store.totals
    totals.val_tokens += int(lengths[is_val].sum())
    totals.train_tokens += int(lengths[~is_val].sum())
    totals.val_documents += int((ends & is_val).sum())
    totals.train_documents += int((ends & ~is_val).sum())
    totals.text_bytes += batch.text_bytes
    for _, documents, complaint in batch.skipped:
        totals.skipped_documents += documents
        if len(totals.skipped_examples) < EXAMPLES_KEPT:
            totals.skipped_examples.append(complaint)


def with_ends(
    encoded: Encoded, ends: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]:
    """The tokens in the output's type with END_OF_TEXT after each text that ends its document."""
    offsets = encoded.offsets.copy()
    offsets[1:] += np.cumsum(ends)
    tokens = np.empty(int(offsets[-1]), dtype=DTYPE)
    places = offsets[1:][ends] - 1
    is_text = np.ones(len(tokens), dtype=np.bool_)
    is_text[places] = False
    tokens[is_text] = encoded.tokens
    tokens[places] = END_OF_TEXT
    return tokens, offsets
