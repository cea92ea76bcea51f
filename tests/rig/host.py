"""The rig's requirements of its host: root, programs, processes, control groups."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support.waiting import DEADLINE_S

PROGRAMS = (
    *("systemd-nspawn", "debootstrap", "dpkg-deb", "ssh", "ssh-keygen"),
    *("ip", "bridge", "tc", "nsenter"),
)


class RigError(Exception):
    """The rig could not carry out an action of a test."""


def missing() -> str | None:
    """Return why this host cannot boot machines, in one line, or None."""
    if os.geteuid() != 0:
        return "booting machines needs root"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(absent)} not found; make test-packages installs them" if absent else None


def run(argv: Sequence[str | Path], *, timeout_s: float = DEADLINE_S) -> str:
    """Return the stdout of a command. Raises RigError with its output if it fails."""
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        said = (done.stderr + done.stdout)[-2000:].strip()
        raise RigError(f"{' '.join(map(str, argv))}: exit status {done.returncode}: {said}")
    return done.stdout


def wait_until(condition: Callable[[], bool], *, what: str, timeout_s: float = DEADLINE_S) -> None:
    """Wait until `condition` holds. Raises RigError with `what` after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise RigError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.05)


def processes() -> Iterator[Path]:
    """Yield the /proc folder of every process."""
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def pids_in_network(namespace: str) -> list[int]:
    """Return the processes in the network namespace, including those inside a machine."""
    try:
        network_stat = (Path("/run/netns") / namespace).stat()
    except FileNotFoundError:
        return []
    found = []
    for process in processes():
        try:
            process_stat = (process / "ns" / "net").stat()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended, or belongs to the container that runs this host
        if (process_stat.st_dev, process_stat.st_ino) == (network_stat.st_dev, network_stat.st_ino):
            found.append(int(process.name))
    return found


def pids_with_argument(prefix: str) -> list[int]:
    """Return the processes with a command-line argument that begins with `prefix`."""
    found = []
    for process in processes():
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if any(argument.startswith(prefix.encode()) for argument in arguments):
            found.append(int(process.name))
    return found


def mounts_below(folder: Path) -> list[Path]:
    """Return the mount points in the folder, the innermost first."""
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    points = [Path(line.split(" ")[1]) for line in lines]
    return [point for point in reversed(points) if folder in point.parents]


def own_cgroups(name: str) -> list[Path]:
    """Return the control groups that a machine's creator must make; empty with systemd.

    Two machines in one group would end each other's services.
    """
    if Path("/run/systemd/system").is_dir():
        return []
    base = Path("/sys/fs/cgroup")
    if (base / "cgroup.controllers").exists():
        return [base / name]
    return [base / kind / name for kind in ("systemd", "unified") if (base / kind).is_dir()]
