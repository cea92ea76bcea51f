"""A control group of this machine with limits, for processes that a test starts."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tests.support.waiting import wait_until

ControlGroup = Callable[..., AbstractContextManager[Sequence[str]]]

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpu", "cpuset", "memory")


def _own_folder(controller: str) -> Path:
    """Return the group of this process, in which new groups are made."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return _ROOT / controller / path.lstrip("/")
    return _ROOT / controller


def problem() -> str | None:
    """Return the reason why this process cannot make control groups, or None."""
    folders = [_own_folder(controller) for controller in _CONTROLLERS]
    missing = [str(each) for each in folders if not os.access(each / "cgroup.procs", os.W_OK)]
    return f"they need to write to {missing[0]}" if missing else None


@contextlib.contextmanager
def control_group(
    *, cpus: float | None = None, cpu_list: str | None = None, memory_bytes: int | None = None
) -> Iterator[Sequence[str]]:
    """Make a group with these limits; yield the command that starts another one in the group.

    The groups are of version 1, one for each controller, and are removed at the end.
    """
    settings: dict[str, Mapping[str, str]] = {}
    if cpus is not None:
        quota = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(int(cpus * 100_000))}
        settings["cpu"] = quota
    if cpu_list is not None:
        nodes = (_own_folder("cpuset") / "cpuset.mems").read_text(encoding="ascii")
        settings["cpuset"] = {"cpuset.cpus": cpu_list, "cpuset.mems": nodes.strip()}
    if memory_bytes is not None:
        settings["memory"] = {"memory.limit_in_bytes": str(memory_bytes)}
    name = f"tileforge-test-{uuid.uuid4().hex[:12]}"
    made: list[Path] = []
    try:
        for controller, values in settings.items():
            folder = _own_folder(controller) / name
            folder.mkdir()
            made.append(folder)
            for key, value in values.items():
                (folder / key).write_text(value, encoding="ascii")
        joins = " ".join(f"echo $$ > '{folder}/cgroup.procs' &&" for folder in made)
        yield ("/bin/sh", "-c", f'{joins} exec "$@"', "sh")
    finally:
        for folder in made:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a group as soon as its last process has ended."""

    def is_removed() -> bool:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return not folder.exists()

    wait_until(is_removed, what=f"the end of all processes in {folder}")
