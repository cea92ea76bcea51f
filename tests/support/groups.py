"""Scheduling of tests on the workers of pytest-xdist, and a worker's crash.

A pytest plugin; tests/conftest.py registers it.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Groups that share machines or run long. The longest come first, so that workers end together.
_FIRST: dict[str, tuple[str, ...]] = {
    "machines from nothing": tuple(
        f"tests/rig/test_{each}.py" for each in ("bootstrap", "chain", "failures", "torchrun")
    ),
    "machines with Slurm": ("tests/rig/test_slurm.py", "tests/rig/test_exports.py"),
    "one run on nodes": ("tests/orchestrate/cluster/test_run.py",),
    "nodes": ("tests/orchestrate/cluster/",),
    "NFS": ("tests/nfs/",),
    "strategies": ("tests/train/strategies/",),
    # Their machines need what the first group has prepared.
    "prepared machines": ("tests/rig/",),
    "ranks": ("tests/train/test_ranks.py",),
    "a real chat model": ("tests/real/test_chat.py",),
    "AMX": ("tests/amx/",),
    "formats": ("tests/formats/",),
    "reports": ("tests/report/",),
}
_FEW_TESTS = 2
"""Minimum number of tests in a worker's queue; a worker only starts a test if it has the next."""

_crashed = pytest.StashKey[bool]()


def group_of(nodeid: str) -> str:
    """Put the tests of a file, or of some folders, into one group, as they share fixtures."""
    file = nodeid.partition("::")[0]
    return next((name for name, starts in _FIRST.items() if file.startswith(starts)), file)


def place_of(nodeid: str) -> int:
    """Return the sort key of a test."""
    group = group_of(nodeid)
    return list(_FIRST).index(group) if group in _FIRST else len(_FIRST)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Assigns whole groups to workers; xdist 3.8's `--dist loadgroup` finds none in pytest 9.2.

    After a worker's crash, xdist 3.8 also repeats the crashed test, which crashes the next worker.
    It also assigns completed groups again, and then waits forever for their reports.
    """

    def _split_scope(self, nodeid: str) -> str:
        stressed = self.config.getoption("stress")
        return nodeid if stressed else group_of(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Return the test in which a worker crashed, and put later tests back into the queue."""
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
        """Assign groups until a worker has enough tests; shut it down if no group remains."""
        if node.shutting_down:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= _FEW_TESTS:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """Return the scheduler that assigns whole groups."""
    return GroupScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Record a crash outside of any test, which fails no test."""
    if error:
        node.config.stash[_crashed] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session of a worker that crashed."""
    if session.config.stash.get(_crashed, False) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
