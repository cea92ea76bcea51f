"""The error with which a command ends, in a terminal and in a pipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import REPO
from tests.support.terminal import Terminal

_WORDS: tuple[tuple[str, ...], ...] = (
    ("data", "verify"),
    ("report",),
    ("orchestrate", "status"),
)


@pytest.mark.processes
@pytest.mark.parametrize("words", _WORDS, ids=lambda words: words[0])
def test_an_error_is_wrapped_at_words_in_a_terminal_and_one_line_in_a_pipe(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "a-folder" / ("long-" * 12) / "none.toml"
    command = [sys.executable, "-m", f"payload.{words[0]}", *words[1:], str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    terminal = Terminal(command, columns=80, cwd=REPO)
    try:
        assert terminal.wait() == done.returncode
        lines = [line.strip() for line in terminal.drawn() if line.strip()]
    finally:
        terminal.close()
    assert " ".join(lines) == done.stderr.strip()
    assert len(lines) > 1
    for line in lines:  # a path or a command is not broken
        assert len(line) <= 80 or " " not in line or "python -m payload." in line
