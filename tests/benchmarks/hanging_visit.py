"""A visit for tests, with three stages that pass and a stage that hangs.

python -m tests.benchmarks.hanging_visit PAGE PIDS
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.runs import Runs
from benchmarks.gpu.visit import Found, Stage


def stage(name: str, run: Callable[[Runs], Found], *, estimate_s: float = 100.0) -> Stage:
    """Return a stage for tests."""
    return Stage(name=name, compared="nothing", wanted="1", estimate_s=estimate_s, run=run)


def passes(_runs: Runs) -> Found:
    """Pass immediately."""
    return Found(text="1", passed=True)


def hang(runs: Runs) -> Found:
    """Run a program that hangs."""
    runs.programs.run("hanging", "tests.benchmarks.hanging_program", sys.argv[2])
    raise AssertionError("the program ended")


if __name__ == "__main__":
    before = [stage(name, passes) for name in ("first", "second", "third")]
    stages = [*before, stage("hangs", hang), stage("last", passes)]
    sys.exit(main(["--rehearse", "--page", sys.argv[1]], stages=stages))
