"""`--until SECONDS`: starts no test after a point in time, and lists the tests that it left out.

A pytest plugin; tests/conftest.py registers it. With it, CI ends within its limit on a machine that
is several times slower than usual.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import pytest

_YEAR_2001 = 1e9
_REASON = "not started before the time of --until"


def _time(text: str) -> float:
    """Return seconds since 1970. A duration, which would leave out every test, is refused."""
    until = float(text)
    if until < _YEAR_2001:
        raise argparse.ArgumentTypeError(f"{text} is not a time in seconds since 1970")
    return until


def add_options(parser: pytest.Parser) -> None:
    """Add the option. A hook of this plugin would run after parsing."""
    parser.getgroup("time limit").addoption(
        "--until",
        type=_time,
        metavar="SECONDS",
        help="start no test after this time, in seconds since 1970",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test after the time, before its fixtures are made."""
    until: float | None = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip(_REASON)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests of each file were left out."""
    skipped = terminalreporter.stats.get("skipped", [])
    files = Counter(each.nodeid.partition("::")[0] for each in skipped if _is_late(each))
    if not files:
        return
    title = f"NOT RUN, as the time was over: {files.total()} tests"
    terminalreporter.section(title, yellow=True, bold=True)
    for file, count in sorted(files.items()):
        terminalreporter.write_line(f"{count:5}  {file}", yellow=True)


def _is_late(report: pytest.TestReport) -> bool:
    return isinstance(report.longrepr, tuple) and _REASON in report.longrepr[2]
