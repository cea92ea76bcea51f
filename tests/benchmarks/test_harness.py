"""The harness of the benchmarks: turns, tables, the page, and that every benchmark uses it."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path

import pytest

from benchmarks.__main__ import benchmarks
from benchmarks.harness import Benchmark, Table, in_turn, machine_class

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# A width after a colon, as in f"{seconds:>8.2f}", which formats a table by hand.
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
        if path.name != "harness.py" and _COLUMN.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_contenders_run_in_turn_and_the_warm_up_does_not_count() -> None:
    calls: list[str] = []

    def contender(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = in_turn({each: partial(contender, each) for each in "ab"}, rounds=2, warm_up=1)
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}


@pytest.mark.processes
def test_the_result_is_one_json_object_and_a_page_has_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = Benchmark("toy", "Time of a toy.\n\nMore.")
    benchmark.parser.add_argument("--rounds", type=int, default=3)
    benchmark.parse(["--rounds", "2", "--page", str(tmp_path / "page.md")])
    table = benchmark.table("seconds", "ratio", title="who", labels=["ours"])
    table.row("ours", "1.25")
    benchmark.note("MFU 70 %")
    benchmark.finish({"step_s": 1.25})
    found = json.loads(capsys.readouterr().out)
    assert (found["benchmark"], found["rounds"], found["step_s"]) == ("toy", 2, 1.25)
    assert found["machine_class"] == machine_class() and found["commit"] and found["versions"]
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.startswith("# Time of a toy\n\n    python -m benchmarks.toy --rounds 2 --page ")
    assert "| who | seconds | ratio |\n|---|--:|--:|\n| ours | 1.25 |  |\n\nMFU 70 %\n" in page
    assert f"class {machine_class()} |" in page


def test_every_benchmark_is_listed_with_one_line() -> None:
    listed = benchmarks()
    assert {"step", "memory", "kernels", "scaling", "plan", "golden", "gpu"} <= set(listed)
    assert all(line.endswith(".") and len(line) <= 100 for line in listed.values())
