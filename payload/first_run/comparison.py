"""Compares answers before and after a run: side by side, and by counts of valid JSON records."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from payload.core.one_line import joined_lines
from payload.core.printable_text import printable
from payload.first_run.function_records import KEYS, FunctionRecord

_SIDE_BY_SIDE_COLUMNS = 72
_GAP = "  "
_SHOWN_CHARS = 230
"""Length after which a printed answer is cut. Only answers that are not JSON are longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The quality of a model's answers about held-out functions."""

    loss: float
    parsed: int
    """Number of answers that are a JSON object with exactly the keys of a record."""
    correct: int
    """Number of answers whose function name and arguments are right."""
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One prompt, with the answers before and after the run."""

    code: str
    before: str
    after: str


def scores(records: Sequence[FunctionRecord], answers: Sequence[str], *, loss: float) -> Scores:
    """Return the scores of `answers`, which has one answer for each record."""
    parsed = correct = 0
    for record, answer in zip(records, answers, strict=True):
        found = _record(answer)
        if found is not None:
            parsed += 1
            correct += all(found[key] == record.answer[key] for key in KEYS[:2])
    return Scores(loss=loss, parsed=parsed, correct=correct, total=len(records))


def _record(answer: str) -> dict[str, object] | None:
    try:
        found = json.loads(answer)
    except ValueError:
        return None
    return found if isinstance(found, dict) and set(found) == set(KEYS) else None


def answers_text(shown: Sequence[Shown], *, columns: int) -> str:
    """Return each function and both answers, side by side if the terminal is wide enough."""
    return "\n\n".join("\n".join(_answer_lines(each, columns=columns)) for each in shown)


def _answer_lines(shown: Shown, *, columns: int) -> list[str]:
    answers = [joined_lines(text, longest=_SHOWN_CHARS) for text in (shown.before, shown.after)]
    lines = printable(shown.code).splitlines()
    if columns < _SIDE_BY_SIDE_COLUMNS:
        for name, answer in zip(("before", "after"), answers, strict=True):
            lines += textwrap.wrap(f"{name}: {answer}", columns, subsequent_indent="  ")
        return lines
    width = (columns - len(_GAP)) // 2
    cells = [
        [name, "-" * width, *textwrap.wrap(answer, width)]
        for name, answer in zip(("before", "after"), answers, strict=True)
    ]
    rows = zip_longest(*cells, fillvalue="")
    return [*lines, *(f"{left:<{width}}{_GAP}{right}".rstrip() for left, right in rows)]


def scores_text(before: Scores, after: Scores) -> str:
    """Return the table of loss and counts before and after."""
    both = (before, after)
    rows = [
        (f"{after.total} functions that were not in training", "before", "after"),
        ("loss of the right answers", *(f"{each.loss:.2f}" for each in both)),
        ("valid JSON", *(f"{each.parsed} of {each.total}" for each in both)),
        ("right name and arguments", *(f"{each.correct} of {each.total}" for each in both)),
    ]
    return "\n".join(f"{name:<42}{one:>10}{other:>10}" for name, one, other in rows)
