"""The short set of `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import short_set
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_benchmark_of_the_short_set_has_the_options_that_it_is_given() -> None:
    commands = short_set(Path("data/stdlib"))
    helps = [
        subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{name}", "--help"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in commands
    ]
    for process, options in zip(helps, commands.values(), strict=True):
        text = process.communicate(timeout=DEADLINE_S)[0]
        assert process.returncode == 0
        assert [each for each in options if each.startswith("--") and each not in text] == []
