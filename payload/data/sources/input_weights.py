"""Weights of the inputs: `--input a.jsonl:3` trains each row of a.jsonl three times an epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from payload.core.errors import UsageError
from payload.core.regular_files import home_path

MOST_WEIGHT = 1000
"""Highest weight of an input. A higher weight is probably a mistake."""


def split_weights(
    given: Sequence[str], *, setting: str = "--input"
) -> tuple[tuple[str, ...], tuple[Fraction, ...]]:
    """Return the paths of the inputs, and their weights. The weights are empty if all are 1.

    Raises UsageError, which names `setting`.
    """
    pairs = [_path_and_weight(each, setting=setting) for each in given]
    paths, weights = (tuple(each) for each in zip(*pairs, strict=True)) if pairs else ((), ())
    if all(weight == 1 for weight in weights):
        return paths, ()
    repeated = next((path for path in paths if paths.count(path) > 1), None)
    if repeated is not None:
        raise UsageError(
            f"{setting} {repeated}: given twice, with weights. Give it once, with the sum of the "
            "weights."
        )
    return paths, weights


def _path_and_weight(given: str, *, setting: str) -> tuple[str, Fraction]:
    """Return the two parts of PATH:WEIGHT.

    The weight is 1 if the whole text is an existing path.
    """
    path, colon, text = given.rpartition(":")
    if not colon or not path or "/" in text or home_path(given).exists():
        return given, Fraction(1)
    try:
        weight = float(text)
    except ValueError:
        if not home_path(path).exists():
            return given, Fraction(1)
        weight = math.nan
    if not 0 < weight <= MOST_WEIGHT:
        raise UsageError(
            f"{setting} {given}: the weight {text!r} is not a number above 0 and at most "
            f"{MOST_WEIGHT:,}. Write PATH:WEIGHT, as in {path}:3 or {path}:0.5."
        )
    return path, Fraction(text.strip())
