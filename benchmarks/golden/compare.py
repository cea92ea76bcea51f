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
    """The first step with any difference; None where all numbers are equal."""
    weights_equal: bool | None
    """True if the weights of all checkpoints are equal bit for bit; None if one run has none."""

    def holds(self, tolerance: float) -> bool:
        """Return whether no difference is above `tolerance`; 0 requires equal weights as well."""
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


def _differences(found: Mapping[int, float], wanted: Mapping[int, float]) -> dict[int, float]:
    """Return the relative difference of each step's numbers; infinity where one is missing."""
    return {
        step: _relative(found[step], wanted[step]) if step in found and step in wanted else math.inf
        for step in {*found, *wanted}
    }


def _relative(found: float, wanted: float) -> float:
    if found == wanted:
        return 0.0
    difference = abs(found - wanted) / abs(wanted) if wanted else math.inf
    return math.inf if math.isnan(difference) else difference
