"""The operator's terminal: several widths, and a closed terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest

from payload.core.errors import INTERRUPTED
from payload.orchestrate.__main__ import main
from payload.orchestrate.follow.follow import Tail
from payload.orchestrate.terminal import console
from payload.orchestrate.terminal.tables import table_lines
from payload.run_record.run_files import RunPaths
from payload.run_record.store_state import StoreState
from tests.orchestrate.test_commands import Workplace
from tests.supervise.planned import (
    REPO,
    StandInAccess,
    plan_stand_in,
    wait_for_steps,
    wait_until_gone,
)
from tests.support.run_folders import make_run, write_state
from tests.support.terminal import Terminal
from tests.support.waiting import DEADLINE_S

WIDTHS = (40, *(pytest.param(columns, marks=pytest.mark.slow) for columns in (80, 200)))
# Retitle the window, write the clipboard (OSC 52), clear the screen, C1's CSI and OSC, a bell.
HOSTILE = (
    "\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[31m\x9b5m\x9d0;owned\x9c\x07\x08"
    "\u202e[bold red]not markup[/] :smiley: plain"
)
SHOWN = "[bold red]not markup[/] :smiley: plain"

OpenTerminal = Callable[..., Terminal]


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture
def open_terminal(workplace: Workplace) -> Iterator[OpenTerminal]:
    """Run a command in a terminal: open_terminal("status", columns=80)."""
    with ExitStack() as stack:

        def start(*arguments: str, columns: int = 80, stand_in: tuple[str, ...] = ()) -> Terminal:
            command, *rest = arguments
            if command == "run":
                rest += [*workplace.settings(), "--inventory", "local"]
            terminal = Terminal(
                [
                    *(sys.executable, "-m", "tests.orchestrate.cli", *stand_in, "--"),
                    *workplace.arguments(command, *rest),
                ],
                columns=columns,
                cwd=REPO,
            )
            stack.callback(terminal.close)
            return terminal

        yield start


def is_harmless(raw: str) -> bool:
    return not any(
        sign in raw for sign in ("\x1b]", "\x1b[2J", "\x1b[31m", "\x07", "\x08", "\u202e", "\x9b")
    )


@pytest.mark.ranks
def test_escape_sequences_and_markup_of_a_rank_reach_no_terminal(
    workplace: Workplace, open_terminal: OpenTerminal
) -> None:
    terminal = open_terminal("run", "--run-id", "one", stand_in=(f"--says={HOSTILE}",), columns=200)
    assert terminal.wait() == 0
    assert SHOWN in terminal.raw()
    assert is_harmless(terminal.raw())
    logs = open_terminal("logs", "one", columns=200)
    assert logs.wait() == 0
    assert SHOWN in logs.raw() and is_harmless(logs.raw())


@pytest.mark.processes
@pytest.mark.parametrize("command", ["status", "list", "logs"])
def test_a_damaged_runs_words_reach_no_terminal_raw(
    workplace: Workplace, open_terminal: OpenTerminal, command: str
) -> None:
    paths = make_run(
        workplace.runs / "one", status="failed", exit_class="training", error=f"a {HOSTILE}"
    )
    paths.logs.mkdir()
    paths.rank_log(0).write_text(f"b {HOSTILE}\n")
    terminal = open_terminal(command)
    assert terminal.wait() == 0
    assert is_harmless(terminal.raw())
    assert SHOWN in terminal.raw() or command == "list"


@pytest.mark.processes
def test_an_error_that_quotes_hostile_text_is_printed_harmless(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal("run", "--set", f"train.{HOSTILE}=1", columns=200)
    assert terminal.wait() == 10
    assert is_harmless(terminal.raw())


@pytest.mark.processes
def test_a_record_adds_no_lines_of_its_own(
    workplace: Workplace, open_terminal: OpenTerminal
) -> None:
    """The attack: a line break in a record, followed by a line that looks like a command's own."""
    forged = "a\nerror: run this"
    store = StoreState(address=f"/x{forged}", problem=forged)
    make_run(workplace.runs / "one", status="failed", exit_class="training", error=forged)
    write_state(RunPaths(workplace.runs / "one"), error=forged, note=forged, store=store)
    terminal = open_terminal("status", columns=200)
    assert terminal.wait() == 0
    assert "a error: run this" in terminal.raw() and "\nerror: run this" not in terminal.raw()


@pytest.mark.slow
def test_a_log_larger_than_the_memory_is_read_in_parts(tmp_path: Path) -> None:
    """The attack: a rank's log of many gigabytes ended `logs`, or the machine's other programs."""
    log = tmp_path / "rank_0000.log"
    log.write_bytes(b"first\n")
    with log.open("r+b") as file:
        file.truncate(2**40)
    tail = Tail(log)
    tracemalloc.start()
    try:
        assert [len(line) for line in islice(tail.lines(), 3)] == [5, 0, 0]
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()


def test_a_table_is_plain_text_and_stacked_where_it_is_too_wide() -> None:
    names = ("run", "status", "step")
    rows = [("a", "[bold]x", ""), ("bbbb", "\x1b[31mends", "1/2")]
    assert table_lines(names, rows, width=23) == [
        "run   status   step",
        "a     [bold]x",
        "bbbb  ends     1/2",
    ]
    assert table_lines(names, rows) == table_lines(names, rows, width=19)
    assert table_lines(names, rows[:1], width=17) == ["run a", "  status [bold]x", "  step "]
    assert table_lines(names, []) == ["run  status  step"]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_reader_that_has_seen_enough_does_not_end_the_run(workplace: Workplace) -> None:
    command = [
        *(sys.executable, "-m", "tests.orchestrate.cli", "--steps", "10", "--"),
        *workplace.arguments("run", "--run-id", "one", *workplace.settings()),
        *("--inventory", "local"),
    ]
    reading, writing = os.pipe()
    process = subprocess.Popen(command, cwd=REPO, stdout=writing, stderr=writing)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    assert process.wait(timeout=DEADLINE_S) == 0
    summary = (workplace.run_paths("one").summary).read_text()
    assert '"status": "finished"' in summary and '"steps": 10' in summary


@pytest.mark.ranks
def test_following_a_log_ends_when_its_reader_has_gone(workplace: Workplace) -> None:
    run = workplace.start(("--steps", "100000"), "run", "--run-id", "one", "--detach")
    run.communicate(timeout=DEADLINE_S)
    paths = workplace.run_paths("one")
    wait_for_steps(paths)
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "payload.orchestrate", *workplace.arguments("logs", "-f")]
    process = subprocess.Popen(command, cwd=REPO, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    with paths.rank_log(0).open("a") as log:
        log.write("one more line\n")
    assert process.wait(timeout=DEADLINE_S) == 0
    assert process.stderr is not None and process.stderr.read() == b""
    assert workplace.call("stop", "--force")[0] == 0
    wait_until_gone(paths)


@pytest.mark.processes
@pytest.mark.parametrize("run_id", ["../../evil", "/tmp/evil", "a b/c", "..", "", "a\nb", "latest"])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_run_id_that_leads_elsewhere_is_refused_and_nothing_is_written(
    workplace: Workplace, command: str, run_id: str
) -> None:
    before = sorted(workplace.data.parent.rglob("*"))
    status, _, err = workplace.call(command, "--run-id", run_id)
    assert status == 10, err
    assert err.count("error: --run-id") == 1 and "Traceback" not in err
    assert sorted(workplace.data.parent.rglob("*")) == before


@pytest.mark.processes
@pytest.mark.parametrize("command", ["status", "logs", "stop", "attach", "collect"])
def test_every_command_that_takes_a_run_refuses_what_is_no_name(
    workplace: Workplace, command: str
) -> None:
    for name in ("../../evil", "/tmp/evil", "a b/c"):
        status, _, err = workplace.call(command, name)
        if command == "collect" and name.startswith("/"):
            # An absolute path names a run in a mounted folder.
            assert status == 10 and "/tmp/evil: no run found" in err
            continue
        assert status == 2, err
        assert err.startswith("error: run ") and "not a valid run id" in err
    status, _, err = workplace.call("run", "--resume", "../x")
    assert status == 2 and "not a valid run id" in err


@pytest.mark.processes
def test_the_trainer_refuses_a_run_folder_that_no_command_would_find_again(tmp_path: Path) -> None:
    for name in ("a b", "-x", "\u00fc"):
        command = [sys.executable, "-m", "payload.train", f"--run-dir={tmp_path / name}"]
        result = subprocess.run(
            [*command, "--config", "payload/configs/quickstart.toml"],
            cwd=REPO,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 2
        assert "the folder's name is the run's id" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("columns", WIDTHS)
def test_the_live_line_and_the_end_table_fit_the_terminal(
    workplace: Workplace, open_terminal: OpenTerminal, columns: int
) -> None:
    terminal = open_terminal("run", "--run-id", "one", columns=columns, stand_in=("--steps", "60"))
    assert terminal.wait() == 0
    drawn = [line for line in terminal.drawn() if re.match(r"(starting ranks|step \d+/\d+) ", line)]
    assert any(re.search(r"\b0:0[1-9]\b", line) for line in drawn), drawn
    assert max(map(len, drawn)) < columns
    assert any("loss" in line for line in drawn)
    table = terminal.drawn()
    for name in ("status", "steps", "validation loss", "tokens/s", "checkpoint"):
        assert any(line.startswith(name) for line in table)
    assert all(len(line) <= columns for line in table if line.startswith(("status", "steps")))


@pytest.mark.processes
@pytest.mark.parametrize("columns", WIDTHS)
def test_list_and_status_show_everything_at_every_width(
    workplace: Workplace, open_terminal: OpenTerminal, columns: int
) -> None:
    name = "gpt2-finetune-20261122-181530-beef"
    plan_stand_in(workplace.runs / name)
    shown = open_terminal("list", columns=columns)
    assert shown.wait() == 0
    assert max(map(len, shown.drawn())) <= columns
    text = " ".join(shown.drawn())
    assert name in text and "starting" in text and "0/100" in text
    ranks = open_terminal("status", columns=columns)
    assert ranks.wait() == 0
    assert max(map(len, ranks.drawn())) <= columns
    assert "last heartbeat" in " ".join(ranks.drawn())


@pytest.mark.slow
@pytest.mark.ranks
def test_without_a_terminal_a_line_comes_now_and_then(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_PLAIN_EVERY_S", 0.5)
    monkeypatch.chdir(REPO)
    access = StandInAccess(os.environ)
    access.options = ("--steps", "60")
    arguments = workplace.arguments("run", *workplace.settings(), "--inventory", "local")
    assert main(arguments, os.environ, access=access) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if " elapsed" in line]
    assert len(lines) >= 3
    assert any(re.match(r"step \d+/100  \[#*-+\]  loss ", line) for line in lines)
    assert not any("\x1b" in line for line in lines)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("phase", "shown"),
    [
        ("load", "loading"),
        ("step", "step"),
        ("checkpoint", "saving"),
        *(
            pytest.param(phase, shown, marks=pytest.mark.slow)
            for phase, shown in (
                ("calibration", "calibrating"),
                ("kernels", "building kernels"),
                ("weights", "sharing weights"),
                ("eval", "evaluating"),
                ("sync check", "checking ranks"),
            )
        ),
    ],
)
def test_ctrl_c_in_a_terminal_ends_the_run_in_every_phase(
    open_terminal: OpenTerminal, workplace: Workplace, phase: str, shown: str
) -> None:
    terminal = open_terminal("run", "--run-id", "one", stand_in=(f"--stays={phase}",))
    terminal.read_until(f"{shown} ")
    terminal.press_ctrl_c()
    status = terminal.wait()
    text = " ".join(terminal.drawn())
    assert "stopping: saving a checkpoint first" in text
    assert "Traceback" not in text
    assert status == INTERRUPTED, text
    wait_until_gone(workplace.run_paths("one"))
