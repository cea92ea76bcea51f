"""The error with which a command ends, in a terminal and in a pipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.terminal import Terminal

_WORDS: tuple[tuple[str, ...], ...] = (
    ("data", "verify"),
    ("report",),
    ("orchestrate", "run", "--config"),
)


def command(words: tuple[str, ...], path: Path) -> list[str]:
    return [sys.executable, "-P", "-m", f"payload.{words[0]}", *words[1:], str(path)]


@pytest.mark.processes
@pytest.mark.parametrize("words", _WORDS, ids=lambda words: words[0])
def test_an_error_is_wrapped_at_words_in_a_terminal(words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "a-folder" / ("long-" * 12) / "none.toml"
    terminal = Terminal(command(words, path), columns=80, cwd=tmp_path)
    try:
        assert terminal.wait() != 0
        lines = [line.strip() for line in terminal.drawn()]
    finally:
        terminal.close()
    errors = lines[next(n for n, line in enumerate(lines) if line.startswith("error: ")) :]
    assert len(errors) > 1 and any(str(path) in line for line in errors)
    assert all(len(line) <= 80 or str(path) in line for line in errors)


@pytest.mark.processes
def test_an_error_is_one_line_in_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "a-folder" / ("long-" * 12) / "none"
    done = subprocess.run(
        command(_WORDS[0], path), capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert len(done.stderr) > 80 and str(path) in done.stderr
