"""Which tests stay on one worker of pytest-xdist, and which of them begin first."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# These share machines, or run long: the longest first, so that no worker is left with one alone.
_FIRST = (
    *("tests/rig/", "tests/orchestrate/cluster/", "tests/train/test_ranks.py"),
    *("tests/real/test_chat.py", "tests/amx/", "tests/formats/"),
)


def group_of(nodeid: str) -> str:
    """A file's tests stay together, as they share what is started; so do those of four folders."""
    file = nodeid.partition("::")[0]
    return next((name for name in _FIRST if file.startswith(name)), file)


def place_of(nodeid: str) -> int:
    """Return the sort key of a test."""
    group = group_of(nodeid)
    return _FIRST.index(group) if group in _FIRST else len(_FIRST)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives whole groups to workers. xdist 3.8's own `--dist loadgroup` sees none in pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
