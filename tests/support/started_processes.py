"""Fails a test that starts a process without a marker for it.

A pytest plugin; tests/conftest.py registers it. Fixtures count for every test that requests them.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import PurePath
from typing import Any

import pytest

MARKERS = frozenset({"processes", "ranks", "sshd", "rig", "engine", "nfs", "ipex"})
"""Markers of tests that start processes."""

_EVENTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
)
# The kernels are built once per machine, by a test that depends on the cache.
_COMPILERS = frozenset({"g++", "clang++"})

_started: list[str] = []
_of_fixtures: dict[object, str] = {}


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    """Record the command of an audit event (https://docs.python.org/3/library/audit_events.html)."""
    if event not in _EVENTS:
        return
    if event == "subprocess.Popen":
        program, command = str(arguments[0]), arguments[1]
        if PurePath(program).name in _COMPILERS:
            return
        _started.append(command if isinstance(command, str) else " ".join(map(str, command)))
    else:
        _started.append(event)


def pytest_configure() -> None:
    """Record the processes that this process starts. An audit hook cannot be removed."""
    sys.addaudithook(_record)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Record which fixtures start processes."""
    before = len(_started)
    result = yield
    if len(_started) > before:
        _of_fixtures[fixturedef] = _started[before]
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Clear the records of earlier tests."""
    _started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail an unmarked test whose fixtures or body started a process."""
    started = _first_started(item)
    result = yield
    if started and not any(mark.name in MARKERS for mark in item.iter_markers()):
        pytest.fail(
            f"{item.nodeid} started a process ({started[:200]}) and has none of the markers "
            f"{', '.join(sorted(MARKERS))}. Mark it with pytest.mark.processes.",
            pytrace=False,
        )
    return result


def _first_started(item: pytest.Item) -> str | None:
    """Return the command of a process that the test or a fixture started, or None."""
    if _started:
        return _started[0]
    if not isinstance(item, pytest.Function):
        return None
    fixtures = (each for defs in item._fixtureinfo.name2fixturedefs.values() for each in defs)
    return next((_of_fixtures[each] for each in fixtures if each in _of_fixtures), None)
