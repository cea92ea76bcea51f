"""Hashes of the rows' content, and the groups of rows with equal content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Keys = npt.NDArray[np.uint64]
"""For each row, a 128-bit hash as two integers."""

KEY_BYTES = 16


def key_of(*parts: bytes | memoryview) -> bytes:
    """Return the hash of content that consists of these parts."""
    found = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        found.update(part)
    return found.digest()


def keys_of(digests: Iterable[bytes]) -> Keys:
    """Return the results of `key_of` as one array."""
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


def equal_groups(keys: Keys) -> Numbers:
    """Return a group number for each row. Rows with equal content have the same number."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    by_key = keys[order]
    is_new = np.ones(len(keys), dtype=np.bool_)
    is_new[1:] = (by_key[1:] != by_key[:-1]).any(axis=1)
    groups = np.empty(len(keys), dtype=np.int64)
    groups[order] = np.cumsum(is_new)
    return groups


def first_of_each(groups: Numbers, *, preferred: Mask) -> Mask:
    """Return a mask with one row of each group: the first preferred row, or the first row."""
    order = np.lexsort((np.arange(len(groups)), ~preferred, groups))
    by_group = groups[order]
    is_first = np.ones(len(groups), dtype=np.bool_)
    is_first[1:] = by_group[1:] != by_group[:-1]
    kept = np.zeros(len(groups), dtype=np.bool_)
    kept[order[is_first]] = True
    return kept
