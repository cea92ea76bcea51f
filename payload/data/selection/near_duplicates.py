"""Groups of rows with nearly the same words, by MinHash and locality-sensitive hashing.

The similarity of two texts is the Jaccard similarity of their sets of five consecutive words.
Sketches estimate the similarity with a standard deviation of 0.04. Only texts that share a bucket
are compared. Two texts share a bucket with probability 0.87 if their similarity is 0.8, and with
probability 0.999 if it is 0.9.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from payload.data.selection.content_keys import Numbers

Sketches = npt.NDArray[np.uint32]
"""MinHash values, one row of `SKETCH_VALUES` for each text."""

SIMILAR = 0.8
"""Lowest estimated similarity of near duplicates."""
SKETCH_VALUES = 128
_SHINGLE_WORDS = 5
_AT_ONCE = 4096
"""Number of shingles or rows that are processed together; each needs 1 kB."""
_RECALL = (0.1, 0.9)
"""Weights of false positives and of false negatives. A false positive only costs time, because the
sketches of two rows in one bucket are compared."""
# Chinese, Japanese and Korean are written without spaces between words, or have short words.
_CHARACTERS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORDS = re.compile(rf"[{_CHARACTERS}]|[^\W{_CHARACTERS}]+")


class Sketcher:
    """Makes the sketches of texts."""

    def __init__(self) -> None:
        from datasketch import MinHash

        # CRC-32 is fast, and equal on every machine; the permutations make up for its simplicity.
        self._empty = MinHash(num_perm=SKETCH_VALUES, seed=1, hashfunc=zlib.crc32)

    def sketch(self, texts: Iterable[str]) -> Sketches:
        """Return the sketch of several texts, as if they were one text."""
        found = self._empty.copy()
        shingles = _shingles(word for text in texts for word in _WORDS.findall(text.casefold()))
        while some := list(islice(shingles, _AT_ONCE)):
            found.update_batch(some)
        values: Sketches = found.hashvalues.astype(np.uint32)
        return values


def _shingles(words: Iterator[str]) -> Iterator[bytes]:
    """Yield every five consecutive words. A shorter text is one shingle."""
    window = list(islice(words, _SHINGLE_WORDS))
    yield " ".join(window).encode("utf-8", "replace")
    for word in words:
        window = [*window[1:], word]
        yield " ".join(window).encode("utf-8", "replace")


def near_groups(groups: Numbers, sketches: Sketches) -> Numbers:
    """Return the group number of each row after groups with similar sketches were joined."""
    numbers = np.arange(len(groups))
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    parents = first[group]
    for band in _bands(sketches):
        _, first, bucket = np.unique(band, return_index=True, return_inverse=True)
        others = first[bucket]
        rows = np.flatnonzero(others != numbers)
        for some in np.split(rows, range(_AT_ONCE, len(rows), _AT_ONCE)):
            equal = (sketches[some] == sketches[others[some]]).mean(axis=1)
            some = some[equal >= SIMILAR]
            for one, other in zip(some.tolist(), others[some].tolist(), strict=True):
                _join(parents, one, other)
    while not np.array_equal(parents, parents[parents]):
        parents = parents[parents]
    return parents


def _bands(sketches: Sketches) -> Iterator[npt.NDArray[np.void]]:
    """Yield each band of the sketches, as one value per row.

    Rows with equal values share a bucket.
    """
    from datasketch import MinHashLSH

    lsh = MinHashLSH(threshold=SIMILAR, num_perm=SKETCH_VALUES, weights=_RECALL)
    for start in range(0, lsh.b * lsh.r, lsh.r):
        band = np.ascontiguousarray(sketches[:, start : start + lsh.r])
        yield band.view(f"V{band.itemsize * lsh.r}")[:, 0]


def _join(parents: Numbers, one: int, other: int) -> None:
    """Join the trees of two rows. The root of a tree is its row with the lowest index."""
    roots = []
    for row in (one, other):
        while parents[row] != row:
            parents[row] = parents[parents[row]]
            row = int(parents[row])
        roots.append(row)
    parents[max(roots)] = min(roots)
