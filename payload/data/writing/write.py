"""Writes encoded batches: adds special tokens, splits the documents and counts them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from payload.data.sources.documents import Batch
from payload.data.sources.split import Split
from payload.data.tokenizers.base import TextTokenizer
from payload.data.writing.encoder_choice import Encoded
from payload.data.writing.resumable_token_files import ResumableTokenFiles
from payload.formats.data_folder import TRAIN_NAME, VAL_NAME, token_dtype

EXAMPLES_KEPT = 20
"""Maximum number of messages about bad documents in meta.json."""


def write_batch(
    store: ResumableTokenFiles,
    batch: Batch,
    encoded: Encoded,
    split: Split,
    tokenizer: TextTokenizer,
) -> None:
    """Append the tokens of one batch to their files, and count them."""
    ends = np.array(batch.ends, dtype=np.bool_)
    is_val = split.val_mask(np.array(batch.numbers, dtype=np.int64))
    begins = np.ones(len(ends), dtype=np.bool_)
    begins[:1], begins[1:] = not store.in_document, ends[:-1]
    tokens, offsets = with_tokens_around(encoded, tokenizer, begins=begins, ends=ends)
    if len(ends):
        store.in_document = not ends[-1]
    # Neighbouring texts that go to the same file are written together.
    edges = [0, *(np.flatnonzero(is_val[1:] != is_val[:-1]) + 1).tolist(), len(is_val)]
    for start, end in pairwise(edges):
        if start < end:
            name = VAL_NAME if is_val[start] else TRAIN_NAME
            store.append(name, tokens[offsets[start] : offsets[end]])
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


def with_tokens_around(
    encoded: Encoded,
    tokenizer: TextTokenizer,
    *,
    begins: npt.NDArray[np.bool_],
    ends: npt.NDArray[np.bool_],
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]:
    """Return the tokens in the output's dtype, with special tokens around each document.

    `begins` and `ends` mark the texts that begin and end a document.
    """
    before, after = tokenizer.begin, tokenizer.end
    offsets = encoded.offsets.copy()
    offsets[1:] += np.cumsum(begins * len(before) + ends * len(after))
    tokens = np.empty(int(offsets[-1]), dtype=token_dtype(tokenizer.vocab_size))
    is_text = np.ones(len(tokens), dtype=np.bool_)
    for shift, token in enumerate(before):
        positions = offsets[:-1][begins] + shift
        is_text[positions], tokens[positions] = False, token
    for shift, token in enumerate(reversed(after)):
        positions = offsets[1:][ends] - 1 - shift
        is_text[positions], tokens[positions] = False, token
    tokens[is_text] = encoded.tokens
    return tokens, offsets
