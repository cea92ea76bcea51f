"""Parameters of which `make test-all` runs a sample, and `make test-seeds` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], *, sample: Collection[Any]) -> list[Any]:
    """Return parameters, those outside of the sample marked `seeds`. A tuple is several arguments.

    Raises AssertionError if the sample has other values.
    """
    every = list(values)
    assert all(each in every for each in sample), (sample, every)
    return [_parameter(each, marks=() if each in sample else pytest.mark.seeds) for each in every]


def _parameter(value: Any, *, marks: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
