"""Lines of a run, a plan and a comparison in a terminal of 80 columns."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from payload.core.suggested_commands import command
from payload.core.wrapped_lines import wrapped
from payload.orchestrate.terminal.narrow import fitted_log_line
from payload.report.source import Run
from payload.report.terminal_comparison import comparison
from payload.run_record.run_files import RunPaths
from tests.orchestrate.test_commands import Workplace
from tests.support.launching import REPO
from tests.support.terminal import Terminal

OLD_RUNS = REPO / "tests" / "fixtures" / "9e71e47" / "project" / "runs"
FIELDS = (
    "step  120/1500  loss 10.8312  margin 0.123  accuracy 87.5%  12,686 tokens/s  lr 3.33e-05  "
    "MFU 12.1%  grad norm 13.06"
)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_a_steps_line_loses_its_last_fields(width: int) -> None:
    (line,) = fitted_log_line(FIELDS, width=width)
    assert len(line) <= width and FIELDS.startswith(line)
    assert line.startswith("step  120/1500  loss 10.8312")
    rest = FIELDS[len(line) :].removeprefix("  ").partition("  ")[0]
    assert not rest or len(line) + 2 + len(rest) > width


def test_other_lines_of_a_log_are_wrapped_at_spaces_under_their_text() -> None:
    log = OLD_RUNS / "full" / "logs" / "rank_0000.log"
    for line in log.read_text(encoding="utf-8").splitlines():
        parts = fitted_log_line(line, width=80)
        assert all(len(part) <= 80 or " " not in part.strip() for part in parts)
        assert " ".join(" ".join(parts).split()) == " ".join(line.split())
        assert all(part.startswith(" " * 10) for part in parts[1:])


def test_a_command_in_a_message_stays_whole() -> None:
    for program in ("data", "orchestrate"):
        fix = command(program, "verb", *("a-long-option" for _ in range(9)))
        lines = wrapped(f"note: {'words ' * 20}with: {fix}", width=80, indent=2)
        assert lines[-1].endswith(fix) and max(map(len, lines[:-1])) <= 80


@pytest.mark.slow
@pytest.mark.ranks
def test_a_real_run_fits_80_columns(workplace: Workplace) -> None:
    short = ("--set", "train.steps=20", "--inventory", "local")
    command = workplace.arguments("run", *workplace.settings(), *short)
    terminal = Terminal(
        [sys.executable, "-m", "payload.orchestrate", *command], columns=80, cwd=REPO
    )
    assert terminal.wait() == 0
    lines = terminal.drawn()
    steps = [line for line in lines if re.match(r"step +\d+/\d+  loss", line)]
    assert steps and any("tokens/s" in line for line in steps)
    # Paths and commands stay whole, to be copied.
    wide = [line for line in lines if len(line) > 80 and "/" not in line]
    assert wide == [], "\n".join(wide)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.mark.processes
def test_a_plan_begins_with_its_estimates(workplace: Workplace) -> None:
    status, out, _ = workplace.call("plan", *workplace.settings(), "--inventory", "local")
    assert status == 0
    headings = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert headings[0] == "estimates"
    assert headings.index("estimates") < headings.index("environment of every rank")
    estimates = out.partition("run folder")[0]
    for name in ("parameters", "memory", "disk", "duration"):
        assert f"\n  {name} " in estimates


@pytest.mark.processes
def test_the_estimates_of_a_plan_fit_80_columns(workplace: Workplace) -> None:
    command = workplace.arguments("plan", *workplace.settings(), "--inventory", "local")
    terminal = Terminal(
        [sys.executable, "-m", "payload.orchestrate", *command], columns=80, cwd=REPO
    )
    assert terminal.wait() == 0
    lines = terminal.drawn()
    estimates = lines[lines.index("estimates") : lines.index("run folder")]
    assert len(estimates) > 8 and max(map(len, estimates)) <= 80


@pytest.mark.parametrize("names", [("full", "kept"), ("labels", "pairs", "full", "lora", "far")])
def test_a_comparison_fits_80_columns(names: tuple[str, ...]) -> None:
    runs = [Run(RunPaths(OLD_RUNS / name)) for name in names]
    narrow, wide = comparison(runs, width=80), comparison(runs)
    assert max(map(len, narrow.splitlines())) <= 80
    heads = " ".join(line for line in narrow.splitlines() if line.startswith("   ")).split()
    assert heads == list(names)
    assert narrow.count("*") == wide.count("*")


def test_a_long_run_id_is_shortened_in_the_middle(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = tmp_path / f"{name}-with-a-long-name-20261122-181530-{name}"
        run.symlink_to(OLD_RUNS / "full")
    runs = [Run(RunPaths(path)) for path in sorted(tmp_path.iterdir())]
    head, *_ = comparison(runs, width=80).splitlines()
    assert re.fullmatch(r" +one-w\S+\.\.\.\S+-181530-one +two-w\S+\.\.\.\S+-181530-two", head)
