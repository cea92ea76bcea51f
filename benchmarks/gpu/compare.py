"""Differences between two runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from payload.run_record.run_files import RunPaths

_TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")


def largest_difference(
    ours: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]], key: str
) -> float:
    """Return the largest relative difference of `key` over all steps.

    It is infinite if a run has no steps, different steps than the reference, or a value that is not
    finite.
    """
    steps = [[row["step"] for row in rows] for rows in (ours, reference)]
    if not steps[0] or steps[0] != steps[1]:
        return math.inf
    pairs = zip(ours, reference, strict=True)
    return _largest(_relative(one[key], other[key]) for one, other in pairs)


def has_same_checkpoint(ours: RunPaths, reference: RunPaths, *, step: int) -> bool:
    """Return whether weights and optimizer state after `step` are equal, bit by bit."""
    one, other = ours.checkpoint(step), reference.checkpoint(step)
    return all((one / f).read_bytes() == (other / f).read_bytes() for f in _TENSOR_FILES)


def started_from_scratch(
    rows: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether a resumed run trained the steps of `first` again.

    Such a run ends with the losses of a resumed run, but its rows have different times.
    """
    return list(rows[: len(first)]) != list(first)


def _relative(one: float, other: float) -> float:
    return abs(one - other) / abs(other) if other else math.inf


def _largest(differences: Iterable[float]) -> float:
    # max() would ignore a NaN.
    return max(each if math.isfinite(each) else math.inf for each in differences)
