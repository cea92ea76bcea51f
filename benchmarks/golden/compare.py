"""Compares two runs of one case, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.golden.runs import SERIES, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences between two runs of one case."""

    name: str
    steps: int
    largest: Mapping[str, float]
    """The largest relative difference of each series."""
    first_step: int | None
    """First step with a difference; None if all numbers are equal."""
    weights_equal: bool | None
    """True if the weights of all checkpoints are equal; None if a run has no weights."""

    def holds(self, tolerance: float) -> bool:
        """Return whether all differences are within `tolerance`; 0 also requires equal weights."""
        if tolerance == 0 and self.weights_equal is False:
            return False
        return max(self.largest.values()) <= tolerance


def compare(name: str, run: Run, other: Run) -> Comparison:
    """Compare a run with a reference, which may have no weights."""
    differences = {key: _differences(run.series[key], other.series[key]) for key in SERIES}
    differing = [step for each in differences.values() for step, found in each.items() if found]
    return Comparison(
        name=name,
        steps=len(run.series["loss"]),
        largest={key: max(each.values()) for key, each in differences.items()},
        first_step=min(differing, default=None),
        weights_equal=dict(run.weights) == dict(other.weights) if other.weights else None,
    )


def _differences(found: Mapping[int, float], expected: Mapping[int, float]) -> dict[int, float]:
    """Return the relative difference of each step's numbers; infinity if one is missing."""
    return {
        step: _relative(found.get(step, math.nan), expected.get(step, math.nan))
        for step in {*found, *expected}
    }


def _relative(found: float, expected: float) -> float:
    if found == expected:
        return 0.0
    difference = abs(found - expected) / abs(expected) if expected else math.inf
    return math.inf if math.isnan(difference) else difference
