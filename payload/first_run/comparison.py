"""Compares answers before and after a run: side by side, and as counts of valid JSON records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from payload.core.printable_text import printable
from payload.first_run.function_records import KEYS, FunctionRecord

_SIDE_BY_SIDE_COLUMNS = 72
_SHOWN_CHARS = 230
"""A longer answer is cut; it is one that never became JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The quality of a model's answers about held-out functions."""

    loss: float
    parsed: int
    """Answers that are a JSON object with exactly the keys of a record."""
    correct: int
    """Parsed answers whose function name and arguments are right."""
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One prompt, with the answers before and after the run."""

    code: str
    before: str
    after: str


def scores(records: Sequence[FunctionRecord], answers: Sequence[str], *, loss: float) -> Scores:
    """Return the scores of one answer for each record."""
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


def print_answers(shown: Sequence[Shown], console: Console) -> None:
    """Print each function and both answers, side by side if the terminal is wide enough."""
    for each in shown:
        console.print()
        console.print(Text(printable(each.code), style="bold"))
        before, after = (_shortened(text) for text in (each.before, each.after))
        if console.width < _SIDE_BY_SIDE_COLUMNS:
            console.print(Text("before: ", style="dim").append(before))
            console.print(Text("after:  ", style="green").append(after))
            continue
        table = Table(box=SIMPLE_HEAD, show_edge=False, expand=True, pad_edge=False)
        table.add_column("before", ratio=1, header_style="dim")
        table.add_column("after", ratio=1, header_style="green")
        table.add_row(Text(before), Text(after))
        console.print(table)


def print_scores(before: Scores, after: Scores, console: Console) -> None:
    """Print the table of loss and counts before and after."""
    console.print()
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(f"{after.total} functions that were not in training")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    table.add_row("loss of the right answers", f"{before.loss:.2f}", f"{after.loss:.2f}")
    for label, key in (("valid JSON", "parsed"), ("right name and arguments", "correct")):
        values = (f"{getattr(each, key)} of {each.total}" for each in (before, after))
        table.add_row(label, *values)
    console.print(table)


def _shortened(text: str) -> str:
    plain = " ".join(printable(text).split())
    return plain if len(plain) <= _SHOWN_CHARS else f"{plain[:_SHOWN_CHARS].rstrip()} ..."
