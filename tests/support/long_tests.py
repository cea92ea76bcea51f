"""Tests of `make test-all` alone: the Makefile finds their files by the text of the marker."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

_MAKEFILE = Path(__file__).parents[2] / "Makefile"


@functools.cache
def long_markers() -> frozenset[str]:
    """Return the markers in LONG_TESTS of the Makefile."""
    found = re.search(r"^LONG_TESTS := (.+)$", _MAKEFILE.read_text(encoding="utf-8"), re.M)
    assert found is not None
    return frozenset(found[1].split(" or "))


def require_marks_in_files(items: Sequence[pytest.Item]) -> None:
    """Raise UsageError if a test has its marker from another file."""
    for item in items:
        missing = long_markers() & {mark.name for mark in item.iter_markers()}
        if missing and not _names_a_marker(item.path):
            raise pytest.UsageError(
                f"{item.nodeid}: marked {', '.join(sorted(missing))} by another file. Write a "
                "pytest.mark into this one, where LONG_FILES of the Makefile looks for it"
            )


@functools.cache
def _names_a_marker(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return re.search(rf"mark\.({'|'.join(long_markers())})\b", text) is not None
