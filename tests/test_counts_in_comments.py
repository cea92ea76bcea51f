"""Comments and docstrings have no counts of this repository's files, which go out of date."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("payload", "infra", "bootstrap", "benchmarks", "tests")
COUNT = re.compile(
    r"(?<![\w-])\d[\d,]* (of (about )?\d[\d,]* )?"
    r"(source files|test files|files|tests|modules|packages|lines of code)\b"
)


def prose_of(source: str) -> list[str]:
    """Return the comments and the docstrings of a Python file."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    return [
        each.string
        for each in tokens
        if each.type == tokenize.COMMENT
        or (each.type == tokenize.STRING and each.string.startswith('"""'))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_comment_counts_files_or_tests(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__) and "fixtures" not in path.parts
        for text in prose_of(path.read_text(encoding="utf-8"))
        for match in COUNT.finditer(text)
    ]
    assert found == []


def test_a_count_is_found() -> None:
    source = '"""Reads 36 of about 1,800 files."""\n# 115 packages, in 3 files\nx = "20 tests"\n'
    found = [match[0] for text in prose_of(source) for match in COUNT.finditer(text)]
    assert found == ["36 of about 1,800 files", "115 packages", "3 files"]
