"""Which tests stay on one worker of pytest-xdist, which of them begin first, and a worker's crash.

A pytest plugin; tests/conftest.py registers it.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# These share machines, or run long: the longest first, so that no worker is left with one alone.
_FIRST = (
    *("tests/rig/", "tests/orchestrate/cluster/", "tests/nfs/", "tests/train/strategies/"),
    *("tests/train/test_ranks.py", "tests/real/test_chat.py", "tests/amx/", "tests/formats/"),
    "tests/report/",
)
_FEW_TESTS = 2
"""A worker begins a test once it knows the next one, so it gets more before it has only one."""

_crashed = pytest.StashKey[bool]()


def group_of(nodeid: str) -> str:
    """A file's tests stay together, as they share what is started; so do those of some folders."""
    file = nodeid.partition("::")[0]
    return next((name for name in _FIRST if file.startswith(name)), file)


def place_of(nodeid: str) -> int:
    """Return the sort key of a test."""
    group = group_of(nodeid)
    return _FIRST.index(group) if group in _FIRST else len(_FIRST)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives whole groups to workers. xdist 3.8's own `--dist loadgroup` sees none in pytest 9.2.

    After a worker's crash, xdist 3.8 also runs the crashed test again, which crashes the next
    worker. It assigns groups that are done, for whose reports it then waits forever.
    """

    def _split_scope(self, nodeid: str) -> str:
        stressed = self.config.getoption("stress")
        return nodeid if stressed else group_of(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Return the test that a worker crashed in; the tests after it go back to the queue."""
        groups = self.assigned_work.pop(node)
        tests = [each for group in groups.values() for each in group.items()]
        crashed: str | None = next((test for test, done in tests if not done), None)
        if crashed is None:
            return None
        for name, group in groups.items():
            rest = {test: done for test, done in group.items() if not done and test != crashed}
            if rest:
                self.workqueue[name] = rest
        for other in self.nodes:
            # A worker that is still collecting gets its tests from `schedule`.
            if other in self.registered_collections:
                self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        """Assign groups until a worker has enough tests, and end it once no group is left."""
        if node.shutting_down:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= _FEW_TESTS:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """With several workers, each gets whole groups."""
    return GroupScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Record a crash: where it was in no test, no test fails for it."""
    if error:
        node.config.stash[_crashed] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session of a worker that crashed."""
    if session.config.stash.get(_crashed, False) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
