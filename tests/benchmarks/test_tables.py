"""The table printer, and that every benchmark uses it."""

from __future__ import annotations

import io
import re
from pathlib import Path

from benchmarks.tables import Table

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# A width after a colon, as in f"{seconds:>8.2f}": a table printed by hand.
_COLUMN = re.compile(r"\{[^{}]*:[<>]\d+")


def test_a_table_has_its_columns_below_each_other() -> None:
    file = io.StringIO()
    table = Table("s a step", "tokens/s", title="who", labels=["ours", "a longer name"], file=file)
    table.row("ours", "1.25", "1,024")
    table.row("a longer name", "10.00")
    table.note("MFU 70 %")
    assert file.getvalue() == (
        "who               s a step   tokens/s\n"
        "ours                  1.25      1,024\n"
        "a longer name        10.00\n"
        "MFU 70 %\n"
    )


def test_cells_that_are_wider_than_their_columns_do_not_touch() -> None:
    file = io.StringIO()
    Table("path", "FLOPs", "torch's", file=file).row("", "transformers", "10,649,280", "1,649,280")
    assert file.getvalue().split() == [
        "path", "FLOPs", "torch's", "transformers", "10,649,280", "1,649,280",
    ]  # fmt: skip


def test_no_benchmark_prints_a_table_by_hand() -> None:
    found = [
        path.name
        for path in BENCHMARKS.rglob("*.py")
        if path.name != "tables.py" and _COLUMN.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []
