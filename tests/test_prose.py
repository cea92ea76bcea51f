"""The prose lint: what it finds, what it leaves, and that its list of exceptions stays short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.prose.__main__ import MOST_EXCEPTIONS, findings_in, read_phrases
from tests.support.prose.texts import Text, texts_of


def _found(path: str, content: str, root: Path) -> list[str]:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)
    phrases, _ = read_phrases()
    return [line for _, line in findings_in(list(texts_of(path, root)), phrases)]


@pytest.mark.parametrize(
    "content",
    [
        '"""Return the checkpoint, or None if it is none of ours."""\n',
        'SIZE = 3\n"""Size of a run that goes on."""\n',
        "# nobody reads it\n",
        'print("the server is asked for its state")\n',
        'print(f"{1} of so many elements")\n',
        '"""A line.\n\nThe run\nsays so.\n"""\n',
    ],
    ids=["docstring", "field", "comment", "message", "f-string", "over two lines"],
)
def test_a_wording_is_found_wherever_a_person_reads_it(tmp_path: Path, content: str) -> None:
    assert len(_found("payload/a.py", content, tmp_path)) == 1


def test_code_between_backticks_is_no_prose(tmp_path: Path) -> None:
    assert not _found("payload/a.py", '"""Set `goes on` here."""\n', tmp_path)
    assert not _found("docs/a.md", "Text.\n\n```\nnobody\n```\n", tmp_path)


def test_strings_of_tests_are_inputs_and_not_read(tmp_path: Path) -> None:
    assert not _found("tests/a.py", 'assert x == "so many"\n', tmp_path)
    assert _found("tests/a.py", "# so many\n", tmp_path)


def test_a_finding_names_the_line(tmp_path: Path) -> None:
    (line,) = _found("docs/a.md", "A.\n\nB\nand so many.\n", tmp_path)
    assert line.startswith("docs/a.md:4: 'so many'; better: ")


def test_each_pattern_finds_something() -> None:
    phrases, exceptions = read_phrases()
    assert len(exceptions) <= MOST_EXCEPTIONS
    assert all(each.reason for each in exceptions)
    for phrase in phrases:
        first = phrase.pattern.pattern.partition("(?:")[2]
        assert first, phrase
    assert list(findings_in([Text("a", 1, "a rank died")], phrases))
