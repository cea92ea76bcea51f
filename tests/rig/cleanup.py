"""Removes a rig. Run as a program, it waits for the rig's process to end, then removes the rig.

The rig's folder, network namespaces, processes and control groups all have its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

from tests.rig.cache import cache_dir, locked
from tests.rig.host import (
    RigError,
    mounts_below,
    own_cgroups,
    pids_in_network,
    pids_with_argument,
    run,
    wait_until,
)

NETWORKS = Path("/run/netns")
_NSPAWN = Path("/run/systemd/nspawn")


def remove_leftovers() -> None:
    """Remove rigs without a process and without a reaper."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with locked(cache_dir() / "live.lock"):
        for folder in sorted((cache_dir() / "live").glob("tfrig-*")):
            if folder.is_dir() and not _is_held(lock_of(folder)):
                remove(folder)


def lock_of(folder: Path) -> Path:
    """Return the lock file of the rig, which is next to its folder and removed last."""
    return folder.with_name(f"{folder.name}.lock")


def _is_held(path: Path) -> bool:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove(folder: Path) -> None:
    """End and remove the rig in this folder. Raises RigError if something remains."""
    name = folder.name
    assert name.startswith("tfrig-"), folder
    wait_until(lambda: _kill(name), what=f"{name}: its processes to end")
    for mount in mounts_below(folder):
        root = mount.stat()
        (_NSPAWN / "locks" / f"inode-{root.st_dev}:{root.st_ino}").unlink(missing_ok=True)
        run(["umount", mount])
    networks = sorted(path.name for path in NETWORKS.glob(f"{name}*"))
    for network in networks:
        run(["ip", "netns", "delete", network])
    for machine in sorted(folder.glob("node-*")):
        _remove_traces(f"{name}-{machine.name}")
    shutil.rmtree(folder)
    lock_of(folder).unlink(missing_ok=True)


def _kill(name: str) -> bool:
    """Kill the rig's remaining processes; return True if there was nothing to kill."""
    pids = set(pids_with_argument(f"--machine={name}-"))
    for network in NETWORKS.glob(f"{name}*"):
        pids.update(pids_in_network(network.name))
    # A thread of the test can be in the operator's network while the test ends.
    pids -= {os.getpid(), os.getppid()}
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return not pids


def _remove_traces(machine: str) -> None:
    for group in own_cgroups(machine):
        # Processes leave their group a moment after they end.
        wait_until(partial(_remove_group, group), what=f"end of {group}")
    shutil.rmtree(_NSPAWN / "propagate" / machine, ignore_errors=True)
    (_NSPAWN / "locks" / machine).unlink(missing_ok=True)


def _remove_group(group: Path) -> bool:
    for folder, _, _ in os.walk(group, topdown=False):
        try:
            Path(folder).rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
    return not group.exists()


def main() -> int:
    """Wait until standard input closes, which happens when the rig's process ends or is killed."""
    sys.stdin.buffer.read()
    try:
        remove(Path(sys.argv[1]))
    except (OSError, RigError) as error:
        sys.stderr.write(f"{sys.argv[1]}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
