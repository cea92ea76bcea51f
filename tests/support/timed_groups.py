"""Prints the time of each group of tests, by markers, and the slowest tests.

A pytest plugin; tests/conftest.py registers it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest

GROUPS = ("engine", "nfs", "ipex", "rig", "sshd", "slow", "ranks", "processes")
"""Groups by marker; a test with several markers counts for the first."""
_SLOWEST = 20


@dataclass(slots=True)
class GroupTime:
    """The tests of a group."""

    tests: set[str] = field(default_factory=set)
    seconds: float = 0.0
    """Sum over its tests, including set-up and teardown."""
    begin: float = float("inf")
    end: float = 0.0

    def add(self, report: pytest.TestReport) -> None:
        """Add the time of a test's phase."""
        self.tests.add(report.nodeid)
        self.seconds += report.duration
        self.begin, self.end = min(self.begin, report.start), max(self.end, report.stop)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Record the group of a test, as a report's keywords also contain folder names."""
    markers = {mark.name for mark in item.iter_markers()}
    name = next((each for each in GROUPS if each in markers), "in one process")
    item.user_properties.append(("group", name))


def group_name(report: pytest.TestReport) -> str:
    """Return the group of a test."""
    return str(dict(report.user_properties)["group"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    groups: dict[str, GroupTime] = defaultdict(GroupTime)
    tests: dict[str, float] = defaultdict(float)
    reports = [each for outcome in terminalreporter.stats.values() for each in outcome]
    for report in reports:
        if isinstance(report, pytest.TestReport) and ("group" in dict(report.user_properties)):
            groups[group_name(report)].add(report)
            tests[report.nodeid] += report.duration
    if not groups:
        return
    terminalreporter.section("time of each group of tests")
    terminalreporter.write_line(f"{'group':<16}{'tests':>7}{'sum, s':>9}{'first to last, s':>18}")
    for name, group in sorted(groups.items(), key=lambda each: -each[1].seconds):
        span = group.end - group.begin
        row = f"{name:<16}{len(group.tests):>7}{group.seconds:>9.0f}{span:>18.0f}"
        terminalreporter.write_line(row)
    terminalreporter.section(f"the slowest {_SLOWEST} tests")
    for nodeid, seconds in sorted(tests.items(), key=lambda each: -each[1])[:_SLOWEST]:
        terminalreporter.write_line(f"{seconds:7.1f} s  {nodeid}")
