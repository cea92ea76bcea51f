"""CONTRACT: the limits that control groups set on this process, for example in a container, job or
service.

A limit holds for a control group and for all groups inside it. So every group from this process's
own group up to the root of the mount limits this process. In a container the root of the mount is
usually the container's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT_BYTES = 2**60
"""A larger number means no limit: version 1 of the interface then writes the largest multiple of
the page size."""
_CACHE = ("active_file", "inactive_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """The lowest limits over all groups of a process; None means no limit."""

    cpus: float | None = None
    """Limit on processor time, in CPUs (seconds of processor time per second)."""
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    """Memory that the group with the least free memory may still use; page cache counts as free."""


def read_limits(*, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> CgroupLimits:
    """Return the limits of this process, in versions 1 and 2 of the kernel's interface."""
    try:
        # A group's name is a folder's name, so it can have any bytes.
        text = (proc_root / "self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        text = ""
    listed = text.splitlines()
    root = sys_root / "fs/cgroup"
    quotas = [quota for folder in _groups(root, "cpu", listed) if (quota := _cpus(folder))]
    memory = [
        (limit, limit - _used_bytes(folder))
        for folder in _groups(root, "memory", listed)
        for limit in _memory_limits(folder)
    ]
    return CgroupLimits(
        cpus=min(quotas, default=None),
        memory_bytes=min((limit for limit, _ in memory), default=None),
        free_memory_bytes=min((max(0, free) for _, free in memory), default=None),
    )


def _groups(root: Path, controller: str, listed: list[str]) -> Iterator[Path]:
    """Yield the folder of each group that can limit the controller; some folders may not exist."""
    mounts = {"": (root, root / "unified"), controller: (root / controller,)}
    found: dict[Path, None] = dict.fromkeys(each for bases in mounts.values() for each in bases)
    for line in listed:
        controllers, _, path = line.partition(":")[2].partition(":")
        parts = path.strip("/").split("/")
        if ".." in parts:
            continue  # outside of this namespace, where no file can be read
        for name in {*controllers.split(",")} & {*mounts}:
            for base in mounts[name]:
                found |= dict.fromkeys(
                    base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)
                )
    yield from found


def _cpus(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not period:
        quota = _text(folder / "cpu.cfs_quota_us")
        period = _text(folder / "cpu.cfs_period_us")
    # `max` and -1 mean no limit.
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(quota) / int(period)


def _memory_limits(folder: Path) -> Iterator[int]:
    # Above memory.high the kernel slows a process down until it is useless for training.
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        text = _text(folder / name)
        if text.isdecimal() and int(text) < _NO_LIMIT_BYTES:
            yield int(text)


def _used_bytes(folder: Path) -> int:
    """Return the memory that a group uses, without page cache."""
    used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
    pairs = (line.partition(" ") for line in _text(folder / "memory.stat").splitlines())
    counts = {name: int(value) for name, _, value in pairs if value.isdecimal()}
    # In version 1 only the total includes the groups in this group.
    cache = sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in _CACHE)
    return max(0, int(used if used.isdecimal() else 0) - cache)


def _text(path: Path) -> str:
    """Return the file's text, or an empty string if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
