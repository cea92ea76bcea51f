"""`benchmarks.gpu`: an interrupted visit leaves its page, and a failed stage its cause."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu import facts
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.compare import has_same_checkpoint, largest_difference, started_from_scratch
from benchmarks.gpu.programs import Programs, cause_in
from benchmarks.gpu.report import render
from benchmarks.gpu.runs import Runs
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.visit import Found, Stage, StageResult, require_package, run_stage
from payload.run_record.run_files import RunPaths
from tests.benchmarks.hanging_visit import passes, stage
from tests.support.terminal import Terminal
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
_SHORT_VISIT = """
import sys
from benchmarks.gpu.__main__ import main
from tests.benchmarks.hanging_visit import passes, stage
sys.exit(main(["--rehearse"], stages=[stage("one", passes)]))
"""


def visit(
    stages: Sequence[Stage], page: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> list[dict[str, Any]]:
    """Rehearse these stages; return their results in the command's JSON."""
    main(["--rehearse", "--page", str(page), *options], stages=stages)
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["stages"]
    return found


def rows_of(page: Path) -> list[str]:
    """Return the names and outcomes of the page's stages."""
    lines = page.read_text(encoding="utf-8").partition("| Stage |")[2].splitlines()
    cells = [line.split(" | ") for line in lines if line.startswith("| ")]
    return [f"{row[0][2:]}: {row[4]}" for row in cells]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.processes
def test_a_visit_that_is_killed_leaves_a_page_with_the_finished_stages(tmp_path: Path) -> None:
    page, pids = tmp_path / "page.md", tmp_path / "pids"
    words = [sys.executable, "-m", "tests.benchmarks.hanging_visit", str(page), str(pids)]
    process = subprocess.Popen(words, cwd=ROOT)
    wait_until(lambda: pids.exists() or process.poll() is not None, what="the fourth stage")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    program, child = map(int, pids.read_text().split())
    try:
        assert rows_of(page) == ["first: passed", "second: passed", "third: passed"]
        assert "Not run yet: hangs, last." in page.read_text()
        assert "waiting for the device" in (tmp_path / "page.logs" / "hanging.log").read_text()
        wait_until(lambda: not is_running(program), what="the end of the stage's program")
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.processes
def test_a_stage_that_hangs_is_killed_with_its_children_and_the_next_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = tmp_path / "pids"

    def hang(runs: Runs) -> Found:
        program = runs.programs.start("hanging", "tests.benchmarks.hanging_program", str(pids))
        wait_until(pids.exists, what="the program's children")
        runs.programs.limit(0.0)
        runs.programs.wait(program)
        raise AssertionError("the program ended")

    stages = [stage("hangs", hang), stage("last", passes)]
    hung, last = visit(stages, tmp_path / "page.md", capsys)
    assert (hung["outcome"], last["outcome"]) == ("failed", "passed")
    assert hung["cause"].endswith("limit of 0 s; last output: waiting for the device")
    program, child = map(int, pids.read_text().split())
    wait_until(lambda: not is_running(program) and not is_running(child), what="their end")


@pytest.mark.parametrize(("rehearsal", "limit_s"), [(False, 60.0), (True, 200.0)])
def test_a_stage_has_a_multiple_of_its_estimate_within_the_budget(
    tmp_path: Path, rehearsal: bool, limit_s: float
) -> None:
    def limit(runs: Runs) -> Found:
        return Found(text=f"{runs.programs.limit_s}", passed=True)

    runs = Runs(tmp_path, Programs(tmp_path / "logs"), rehearsal=rehearsal)
    stages = [stage("short", limit, estimate_s=20.0), stage("long", limit, estimate_s=900.0)]
    ends_s = time.monotonic() + 1000
    short, long = (run_stage(each, runs, ends_s=ends_s) for each in stages)
    assert float(short.found) == limit_s
    assert 900 < float(long.found) <= 1000


@pytest.mark.processes
def test_a_stage_that_fails_gives_its_cause_and_keeps_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(runs: Runs) -> Found:
        runs.train({"refused": {"train.steps": 0}})
        raise AssertionError("the trainer took a run of no steps")

    def broken(_runs: Runs) -> Found:
        return Found(text=str(1 / 0), passed=True)

    page = tmp_path / "page.md"
    stages = [stage("refused", refused), stage("broken", broken), stage("fine", passes)]
    first, second, third = visit(stages, page, capsys)
    assert [each["outcome"] for each in (first, second, third)] == ["failed", "failed", "passed"]
    assert "exit code 10" in first["cause"] and "train.steps = 0" in first["cause"]
    assert second["cause"] == "ZeroDivisionError: division by zero"
    text = page.read_text(encoding="utf-8")
    for result in (first, second):
        assert f"{result['cause']} (log: `{result['log']}`)" in text
    assert "train.steps = 0" in (tmp_path / first["log"]).read_text()
    assert "1 / 0" in (tmp_path / second["log"]).read_text()


@pytest.mark.processes
def test_a_stage_that_does_not_fit_in_the_budget_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [stage("long", passes, estimate_s=1e6), stage("last", passes)]
    skipped, last = visit(stages, tmp_path / "page.md", capsys, "--budget-s", "1000")
    assert (skipped["outcome"], last["outcome"]) == ("skipped", "passed")
    assert re.fullmatch(r"needs about 1000000 s, \d+ s left", skipped["found"])
    assert skipped["found"] in (tmp_path / "page.md").read_text()


@pytest.mark.processes
def test_a_stage_without_its_package_is_not_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def needs(_runs: Runs) -> Found:
        require_package("no_such_package", setting="precision.fp8")
        raise AssertionError("found a package that does not exist")

    (found,) = visit([stage("fp8", needs)], tmp_path / "page.md", capsys)
    assert found["outcome"] == "not tried here"
    assert found["found"] == "precision.fp8 needs no_such_package, which is not installed"


def test_a_missing_package_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts.missing_packages, "__defaults__", (("numpy", "no_such_package"),))
    assert main(["--rehearse"]) == 10
    shown = capsys.readouterr().err
    assert shown.splitlines() == [
        "error: not installed: no_such_package. Install with: pip install no_such_package"
    ]


@pytest.mark.processes
def test_without_a_cuda_device_the_command_says_so_and_writes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--page", str(tmp_path / "page.md")]) == 10
    begun, *error = capsys.readouterr().err.splitlines()
    assert begun == "stage 1 of 25: device"
    assert re.match(r"error: .* sees no CUDA device. Run this on a machine", " ".join(error))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_visit_of_chosen_stages_begins_with_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [stage(name, passes) for name in ("device", "fp32", "sync check", "nf4")]
    page = tmp_path / "page.md"
    found = visit(stages, page, capsys, "--only", "nf4", "sync check")
    assert [each["name"] for each in found] == ["device", "sync check", "nf4"]
    assert "--rehearse --only nf4 'sync check' --page FILE`" in page.read_text()


def test_an_unknown_stage_is_refused_with_the_names_of_the_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--rehearse", "--only", "nf8"], stages=[stage("nf4", passes)]) == 10
    assert capsys.readouterr().err == (
        "error: --only 'nf8': this stage does not exist. Use one of: nf4\n"
    )


@pytest.mark.processes
def test_each_stage_is_named_when_it_begins_and_the_last_line_is_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_runs: Runs) -> Found:
        assert capsys.readouterr().err.splitlines()[-1] == "stage 2 of 4: fails"
        return Found(text="numbers and more numbers " * 6, passed=False)

    stages = [stage("one", passes), stage("fails", fails), stage("long", passes, estimate_s=1e6)]
    assert main(["--rehearse"], stages=[*stages, stage("last", passes)]) == 1
    found = capsys.readouterr()
    lines = found.err.splitlines()
    assert re.fullmatch(r"2 of 4 stages passed in \d+ s; failed: fails; skipped: long", lines[-1])
    assert max(map(len, lines)) <= 80
    assert json.loads(found.out)["benchmark"] == "gpu"


@pytest.mark.processes
def test_a_terminal_gets_no_json() -> None:
    terminal = Terminal([sys.executable, "-c", _SHORT_VISIT], columns=80, cwd=ROOT)
    try:
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert terminal.drawn()[-1].startswith("1 of 1 stages passed in ")
    assert "{" not in terminal.raw()


def test_the_estimates_leave_time_for_the_most_valuable_stages() -> None:
    assert sum(stage.estimate_s for stage in STAGES[:9]) < 540
    assert len({stage.name for stage in STAGES}) == len(STAGES)


@pytest.mark.parametrize("cause", ["a | b", "two\nlines", "`code` | \\|", "", "é\x00"])
def test_a_page_keeps_its_table_whatever_a_cause_says(cause: str) -> None:
    result = StageResult(
        name="one", compared="a", wanted="b", found=cause, outcome="failed", cause=cause, log="l"
    )
    text = render([result], facts={"Commit": cause}, not_run=[])
    (row,) = [line for line in text.splitlines() if line.startswith("| one |")]
    assert row.replace(r"\|", "").count("|") == 7
    assert text.count("\n- one: ") == 1


def test_the_cause_in_a_log_is_the_line_that_names_the_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "step 1\nTraceback (most recent call last):\ntorch.AcceleratorError: CUDA error: an "
        "illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`\n\n"
    )
    assert cause_in(log).startswith("torch.AcceleratorError: CUDA error: an illegal")
    log.write_text("step 1\n\n")
    assert cause_in(log) == "step 1"
    log.write_bytes(b"\xff\n")
    assert cause_in(log) == "\N{REPLACEMENT CHARACTER}"
    log.write_text("")
    assert cause_in(log) == "no output"


def _rows(*losses: float) -> list[dict[str, float]]:
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("ours", "reference", "wanted"),
    [
        (_rows(2.0, 1.0), _rows(2.0, 1.0), 0.0),
        (_rows(2.0, 1.5), _rows(2.0, 1.0), 0.5),
        (_rows(math.nan, 1.0), _rows(2.0, 1.0), math.inf),
        (_rows(2.0, math.nan), _rows(2.0, 1.0), math.inf),
        (_rows(2.0), _rows(2.0, 1.0), math.inf),
        (_rows(), _rows(), math.inf),
        (_rows(1.0), _rows(0.0), math.inf),
    ],
)
def test_the_largest_difference_is_infinite_where_runs_cannot_be_compared(
    ours: list[dict[str, float]], reference: list[dict[str, float]], wanted: float
) -> None:
    assert largest_difference(ours, reference, "loss") == wanted


def test_a_run_that_started_from_scratch_is_not_taken_for_a_resumed_one() -> None:
    first = [{"step": 1, "loss": 2.0, "time_unix": 10.0}]
    again = [{"step": 1, "loss": 2.0, "time_unix": 11.0}, {"step": 2, "loss": 1.0}]
    assert started_from_scratch(again, first)
    assert not started_from_scratch([*first, {"step": 2, "loss": 1.0}], first)


def test_one_other_bit_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    one, other = RunPaths(tmp_path / "one"), RunPaths(tmp_path / "other")
    for run in (one, other):
        run.checkpoint(6).mkdir(parents=True)
        for name in ("model.safetensors", "optimizer.safetensors"):
            (run.checkpoint(6) / name).write_bytes(b"\x00\x01")
    assert has_same_checkpoint(one, other, step=6)
    (other.checkpoint(6) / "optimizer.safetensors").write_bytes(b"\x00\x00")
    assert not has_same_checkpoint(one, other, step=6)
