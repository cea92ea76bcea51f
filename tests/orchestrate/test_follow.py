"""Following a run's files while others append to them, cut them, replace and damage them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from payload.config.training_sections import TrainSection
from payload.core.files import write_whole
from payload.core.interrupts import Interrupts
from payload.orchestrate.follow import follow
from payload.orchestrate.follow.follow import Tail, Tails, show, show_steps
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.sites.local import LocalRun
from payload.orchestrate.terminal.console import LiveLine
from payload.run_record.metrics_log import StepMetrics, to_json_line
from payload.run_record.run_files import RunPaths

STEP = StepMetrics(
    step=7,
    tokens=70,
    loss=3.5,
    lr=0.1,
    grad_norm=1.0,
    step_time_s=0.5,
    tokens_per_s=20.0,
    mfu=None,
    data_time_s=0.0,
    sync_time_s=0.0,
    rss_bytes=1,
)


def test_a_signal_to_a_process_and_to_its_group_is_one_request() -> None:
    """`timeout` sends SIGTERM to both, https://www.gnu.org/software/coreutils/timeout."""
    with Interrupts() as interrupts:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
            assert interrupts.count == 1, number
        signal.raise_signal(signal.SIGINT)  # tests/test_interrupts.py has two of one press
        assert interrupts.count == 2


def test_a_tail_gives_whole_lines_and_starts_again_when_the_file_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == ["one"]
    path.write_bytes(b"one\ntwo\nthree")
    assert (list(tail.lines()), tail.rest()) == (["two"], "three")
    path.write_bytes(b"new\n")
    assert list(tail.lines()) == ["new"]
    assert list(Tail(path, from_end=True).lines()) == []


@pytest.mark.parametrize("replaced", [False, True], ids=["cut in place", "replaced"])
@pytest.mark.parametrize("from_end", [False, True])
def test_a_file_that_was_cut_and_grew_past_the_old_end_unseen_is_read_from_its_start(
    tmp_path: Path, replaced: bool, from_end: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 4.25}}\n' for step in range(1, 20)))
    tail = Tail(path, from_end=from_end)
    list(tail.lines())
    rows = [f'{{"step": {step}, "loss": 3.125}}' for step in range(1, 40)]
    if replaced:
        write_whole(path, "\n".join(rows) + "\n")
    else:
        path.write_text("\n".join(rows) + "\n")
    assert list(tail.lines()) == rows


def test_a_replaced_file_of_the_same_beginning_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("1\n2\n3\n")
    tail = Tail(path)
    list(tail.lines())
    write_whole(path, "1\n2\n3\n4\n")
    assert list(tail.lines()) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link"])
def test_other_file_types_have_no_lines_and_do_not_block(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    assert list(Tail(path, from_end=True).lines()) == list(Tail(path).lines()) == []


def test_a_line_without_an_end_does_not_pile_up(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (2**20 + 1))
    tail = Tail(path)
    assert [len(line) for line in tail.lines()] == [2**20 + 1]
    assert tail.rest() == ""


def test_escape_sequences_of_a_log_do_not_come_out_of_a_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\x1b]52;c;aGk=\x07safe\x1b[2J\r\xc2\x9b31m\nrest\x1b]0;title")
    tail = Tail(path)
    assert (list(tail.lines()), tail.rest()) == (["safe"], "rest")


RESTART = """\
import os, sys
metrics, how, rows = sys.argv[1:]
target = metrics + ".fresh" if how == "replaced" else metrics
with open(target, "w") as file:
    file.write(rows)
os.replace(target, metrics)
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["cut in place", "replaced"])
def test_a_run_that_restarted_between_reads_is_still_followed(tmp_path: Path, how: str) -> None:
    paths = RunPaths(tmp_path)
    first = "".join(to_json_line(replace(STEP, step=step)) for step in range(1, 20))
    paths.metrics.write_text(first)
    tail = Tail(paths.metrics)
    list(tail.lines())
    # Rows of another length: an old offset is in the middle of one.
    again = "".join(to_json_line(replace(STEP, step=step, loss=2.25)) for step in range(1, 32))
    command = [sys.executable, "-c", RESTART, str(paths.metrics), how, again]
    supervisor = subprocess.Popen(command)
    supervisor.wait()
    out = io.StringIO()
    tails = Tails(paths)
    tails.metrics = tail
    show(
        LocalRun(paths, access=LocalAccess({}), supervisor=supervisor),
        talk=Console(file=out, force_terminal=True, width=200),
        train=TrainSection(steps=31),
        tails=tails,
    )
    assert "step 31/31" in out.getvalue()


@pytest.mark.processes
def test_trackers_are_started_once_and_end_before_ctrl_c_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = []

    @contextmanager
    def watched(*_: object) -> Iterator[None]:
        yield
        handlers.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr(follow, "tracked", watched)
    before = signal.getsignal(signal.SIGINT)
    paths = RunPaths(tmp_path)
    show(
        LocalRun(paths, access=LocalAccess({}), supervisor=subprocess.Popen(["true"])),
        talk=Console(file=io.StringIO()),
        train=TrainSection(),
        tails=Tails(paths),
    )
    assert len(handlers) == 1 and handlers[0] is not before
    assert signal.getsignal(signal.SIGINT) is before


def lines_that_are_no_step() -> list[str]:
    """Return lines that a damaged or hostile metrics.jsonl may hold."""
    row = asdict(STEP)
    steps: list[Any] = ["7", None, 7.5, -1, True, [], {}, 10**30]
    changes: list[dict[str, Any]] = [{"step": step} for step in steps]
    changes += [{"tokens": 0}, {"tokens": "many"}, {"loss": None}, {"loss": "low"}]
    changes += [{"step_time_s": -1}, {"step_time_s": 1e300}, {"step_time_s": "fast"}]
    changes += [{"mfu": "high"}, {"tokens_per_s": []}]
    lines = [json.dumps(row | change) for change in changes]
    lines += [json.dumps({name: row[name] for name in row if name != left}) for left in row]
    lines += ["", "{", "null", "7", '"loss"', "[]", '["loss"]', '{"loss": 1}', "loss", "\0"]
    lines += ["[" * 20_000, '{"loss": NaN}', '{"loss": Infinity}', "1" * 4_301]
    lines += [f'{{"loss": 1e{"9" * 400}}}', json.dumps(row)[20:], json.dumps(row)[:-20]]
    return lines


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_that_is_no_step_is_passed_over(tmp_path: Path, terminal: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    bad = lines_that_are_no_step()
    content = "".join(f"{line}\n{to_json_line(STEP)}" for line in bad).encode()
    shown: list[Any] = []

    class Seen(LiveLine):
        def step(self, row: Any) -> None:
            super().step(row)
            shown.append(row["step"])

    console = Console(file=io.StringIO(), force_terminal=terminal)
    with Seen(console, train=TrainSection(steps=10), nodes=1) as live:
        for chunk in (content, b"\xff\xfe\n", to_json_line(STEP).encode()):
            with path.open("ab") as file:
                file.write(chunk)
            live.cost(1.0)
            show_steps(tail := Tail(path), live)
    assert set(shown) == {7} and len(shown) >= 100
    assert tail.rest() == ""
