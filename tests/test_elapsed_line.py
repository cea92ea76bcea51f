"""A long part of a command shows its time on a terminal, and nothing in a pipe."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.launching import REPO
from tests.support.terminal import Terminal

PROGRAM = """
import time
from payload.core.elapsed_line import elapsed_line
with elapsed_line("writing model.gguf"):
    time.sleep(%s)
print("done")
"""


@pytest.mark.processes
def test_a_long_part_shows_its_time_on_a_terminal_and_clears_the_line() -> None:
    terminal = Terminal([sys.executable, "-c", PROGRAM % 3.2], columns=80, cwd=REPO)
    assert terminal.wait() == 0
    assert any(line.startswith("writing model.gguf: ") for line in terminal.drawn())
    assert terminal.raw().rstrip().endswith("\x1b[Kdone")


@pytest.mark.processes
def test_a_short_part_and_a_pipe_show_nothing() -> None:
    terminal = Terminal([sys.executable, "-c", PROGRAM % 0], columns=80, cwd=REPO)
    assert terminal.wait() == 0 and terminal.drawn() == ["done"]
    piped = subprocess.run(
        [sys.executable, "-c", PROGRAM % 2.5], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert (piped.stdout, piped.stderr) == ("done\n", "")
