"""Finds the processes of a run by an environment variable and by ancestry, and ends them.

The processes include ranks of a killed supervisor. Such ranks save and end by themselves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from payload.core.errors import PreflightError
from payload.machines.rank_variables import RUN_DIR
from payload.run_record.checkpoint_grace import GracePeriod
from payload.run_record.run_files import RankProgress, RunPaths, last_record

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_POLL_S = 0.2
_KILL_S = 10.0
_EXEC_S = 1.0
_MEMORY, _VARIABLES_END = 23 - 3, 51 - 3
"""Indices into the result of `_fields`. The memory size of a kernel thread is 0."""


def adopt_orphans() -> None:
    """Make this process the new parent of descendants when their parents end (Linux)."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Return a `preexec_fn` that makes the kernel send `number` when the parent ends (Linux)."""
    if sys.platform != "linux":
        return None
    parent = os.getpid()
    # Load the library before the fork: loading it after a fork is not safe.
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def set_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)

    return set_signal


def processes_of(run_dir: Path) -> set[int]:
    """Return the living processes of the run at `run_dir`, except this process."""
    found = _marked_in_proc(run_dir) if _PROC.is_dir() else _named_by_ps(run_dir)
    return found - {os.getpid()}


def wait_until_none(run_dir: Path, *, timeout_s: float) -> set[int]:
    """Wait at most `timeout_s` until the run's processes end; return the ids of the processes that
    are still alive."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def kill_all(run_dir: Path) -> None:
    """Send SIGKILL to every current process of the run."""
    for pid in processes_of(run_dir):
        _send(pid, signal.SIGKILL)


def kill_until_none(run_dir: Path, *, timeout_s: float) -> set[int]:
    """Kill the run's processes repeatedly until all have ended.

    Returns the processes that could not be ended, because they are stuck in the kernel.
    """
    deadline = time.monotonic() + timeout_s
    left = processes_of(run_dir)
    while left and time.monotonic() < deadline:
        kill_all(run_dir)
        left = wait_until_none(run_dir, timeout_s=0.5)
    return left


def reap_children() -> None:
    """Reap ended children, including adopted ones.

    Do not call this while `Popen` waits for a child.
    """
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


def signal_process(pid: int, number: signal.Signals, *, run_dir: Path) -> bool:
    """Send a signal to `pid` if it is still a process of the run; return True if it was sent."""
    return pid in processes_of(run_dir) and _send(pid, number)


def wait_for_orphans(
    paths: RunPaths, grace_period: GracePeriod, *, pause: Callable[[float], bool]
) -> None:
    """Wait on the head until all ranks of an earlier supervisor have ended.

    `pause` sleeps and returns False if an immediate end is requested. Raises PreflightError.
    """
    first = last_record(RankProgress, paths.rank_progress(0))
    if first is not None:
        # The wrapper of rank 0 may not have noticed that the earlier supervisor was gone.
        signal_process(first.pid, signal.SIGTERM, run_dir=paths.root)
    while processes_of(paths.root) and not grace_period.is_over() and pause(_POLL_S):
        continue
    left = kill_until_none(paths.root, timeout_s=_KILL_S)
    if left:
        raise PreflightError(
            f"processes {sorted(left)} of an earlier supervisor of this run could not be ended. "
            "End these processes with `kill -9`, and start the run again."
        )


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _marked_in_proc(run_dir: Path) -> set[int]:
    """Return the processes that have the run's environment variable, and their descendants."""
    mark, folder = f"{RUN_DIR}=".encode(), os.path.realpath(run_dir)
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            state, parent = _state_and_parent(entry)
            environment = _environment(entry)
        except (OSError, ValueError):
            continue
        if state == "Z":
            continue
        parents[int(entry.name)] = parent
        values = [each for each in environment.split(b"\0") if each.startswith(mark)]
        if any(os.path.realpath(os.fsdecode(each[len(mark) :])) == folder for each in values):
            marked.add(int(entry.name))
    return marked | _descendants(marked, parents)


def _state_and_parent(entry: Path) -> tuple[str, int]:
    state, parent = _fields(entry)[:2]
    return state, int(parent)


def _environment(entry: Path) -> bytes:
    """Return the environment of a process; during an exec, wait until the exec is over.

    During an exec, the environment is empty. Popen returns before the exec is over, so a stop at
    that moment would otherwise not find the launcher.
    """
    ends = time.monotonic() + _EXEC_S
    while not (found := (entry / "environ").read_bytes()):
        fields = _fields(entry)
        has_memory, has_variables = fields[_MEMORY] != "0", fields[_VARIABLES_END] != "0"
        if has_variables or not has_memory or time.monotonic() > ends:
            break
        time.sleep(0.001)
    return found


def _fields(entry: Path) -> list[str]:
    """Return the fields of proc_pid_stat(5), beginning with the third."""
    # The second field is a name in parentheses that may contain spaces and parentheses.
    return (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def _descendants(roots: set[int], parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    known = set(roots)
    while True:
        new = {pid for pid, parent in parents.items() if parent in known and pid not in known}
        if not new:
            return found
        found |= new
        known |= new


def _named_by_ps(run_dir: Path) -> set[int]:
    """Return the run's processes by their command line, for systems without /proc."""
    columns = ["-o", "pid=", "-o", "stat=", "-o", "command="]
    listed = subprocess.run(
        ["ps", "-A", "-ww", *columns], capture_output=True, text=True, check=True
    )
    return parse_ps(listed.stdout, run_dir=run_dir) | parse_ps(
        listed.stdout, run_dir=Path(os.path.realpath(run_dir))
    )


def parse_ps(text: str, *, run_dir: Path) -> set[int]:
    """Return the living processes in `ps` output that have the run folder in their command line."""
    found = set()
    for line in text.splitlines():
        pid, state, command = line.split(maxsplit=2)
        # The space distinguishes /runs/a from /runs/ab.
        if not state.startswith("Z") and f"--run-dir {run_dir} " in f"{command} ":
            found.add(int(pid))
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
