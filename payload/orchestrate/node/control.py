"""Starts, reads and stops one run on this node.

Runs on a node with python3 only. The program is read from stdin, followed by its arguments as a
JSON object: action (claim, start, read, signal, left), run_dir, and the arguments of the action's
function. Prints a JSON object.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a supervisor handles; it unblocks them when it is ready."""

_START_S = 30.0
# A supervisor that starts holds its lock before its command line appears in /proc.
_FIND_S = 2.0
_PING_S = 5
_MOST_BYTES = 4 * 2**20
_WHOLE_BYTES = 2**20


def act(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one action."""
    run_dir = Path(arguments["run_dir"])
    action = arguments["action"]
    if action == "claim":
        return claim(run_dir, arguments["name"])
    if action == "start":
        return start(run_dir, arguments["argv"], arguments["python_path"], name=arguments["name"])
    if action == "read":
        return read(run_dir, arguments["whole"], arguments["known"])
    if action == "signal":
        return send(run_dir, arguments["signals"], arguments.get("request"))
    return left(run_dir, kill=arguments["kill"])


def claim(run_dir: Path, name: str) -> dict[str, Any]:
    """Claim this node, so that only the caller can start a run or trial on it.

    The claim is a lock. On success `claim` is true, and the program holds the lock until its stdout
    is closed, for example because the caller was killed. Otherwise `running` names the run in
    progress, or `held` has the description that the current holder wrote.
    """
    runs = run_dir.parent
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / ".claim.lock").open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            return {"claim": False, "running": None, "held": lock.read()}
        lock.truncate(0)
        holder = {"name": name, "run_id": run_dir.name}
        if "SSH_CONNECTION" in os.environ:
            holder["origin"] = os.environ["SSH_CONNECTION"].split()[0]
        lock.write(json.dumps(holder))
        lock.flush()
        with (runs / ".start.lock").open("w") as starting:
            # The previous holder can have been killed while it started a supervisor.
            fcntl.flock(starting, fcntl.LOCK_EX)
        running = [each.parent.name for each in runs.glob("*/supervisor.lock") if is_held(each)]
        if running:
            return {"claim": False, "running": running[0], "held": None}
        answer = {"claim": True, "running": None, "held": None}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        wait_until_output_closes()


def claimed_by(runs: Path) -> str | None:
    """Return the name of the claim's holder, or None if the claim is not held."""
    claim = runs / ".claim.lock"
    if not is_held(claim):
        return None
    name: str = json.loads(claim.read_text("utf-8"))["name"]
    return name


def wait_until_output_closes() -> NoReturn:
    """Wait until the reader of stdout is gone, then exit."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # poll only for errors and hang-ups
    with contextlib.suppress(OSError):
        while not poll.poll(1000 * _PING_S):
            # Without traffic the kernel would not detect that the other machine is gone.
            sys.stdout.write("\n")
            sys.stdout.flush()
    os._exit(0)  # exit without flushing, because there is no reader


def start(run_dir: Path, argv: list[str], python_path: str, *, name: str) -> dict[str, Any]:
    """Start the run's supervisor in a new session, if no run is in progress on this node.

    `name` is the name in the caller's claim. The result has one of three forms: the `pid` of a
    supervisor that is ready, the run in progress as `running`, or the exit `status` with the last
    line of output as `said`.
    """
    with (run_dir.parent / ".start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if claimed_by(run_dir.parent) != name:
            return {
                "status": 0,
                "said": "the connection that held the claim on this node has ended",
            }
        for other in run_dir.parent.glob("*/supervisor.lock"):
            if is_held(other):
                return {"running": other.parent.name}
        (run_dir / "logs").mkdir(exist_ok=True)
        log_path = run_dir / "logs" / "supervisor.log"
        with log_path.open("ab") as log, blocked(STOP_SIGNALS):
            supervisor = subprocess.Popen(
                argv,
                cwd=run_dir,
                env={**os.environ, "PYTHONPATH": python_path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ends = time.monotonic() + _START_S
        while supervisor.poll() is None and time.monotonic() < ends:
            if state(run_dir).get("supervisor_pid") == supervisor.pid:
                return {"pid": supervisor.pid}
            time.sleep(0.05)
        if supervisor.poll() is None:
            supervisor.kill()
        text = (run_dir / "logs" / "supervisor.log").read_text("utf-8", errors="replace").strip()
        return {"status": supervisor.wait(), "said": text.rpartition("\n")[2]}


def read(
    run_dir: Path,
    whole: list[str],
    known: dict[str, tuple[int, str]],
    *,
    most_bytes: int = _MOST_BYTES,
) -> dict[str, Any]:
    """Return the content of small files, and the new bytes of growing files.

    `known` maps each growing file to the number of bytes that the caller has, and to the last of
    these bytes in base64. If the file has different bytes there, the file was replaced and is sent
    from the start. A response has at most `most_bytes` bytes; `left` is the number of bytes that
    did not fit.
    """
    alive = is_held(run_dir / "supervisor.lock")
    begun = (run_dir / "state.json").exists() or any((run_dir / "progress").glob("*.json"))
    found = {}
    for name in whole:
        with contextlib.suppress(OSError), regular(run_dir / name) as file:
            found[name] = file.read(_WHOLE_BYTES).decode("utf-8", errors="replace")
    more = {}
    room = most_bytes
    left = 0
    for name, (offset, end) in known.items():
        with contextlib.suppress(OSError), regular(run_dir / name) as file:
            offset, content, size = new_bytes(file, offset, base64.b64decode(end), most=room)
            room -= len(content)
            left += max(0, size - offset - len(content))
            more[name] = {"offset": offset, "content": base64.b64encode(content).decode()}
    return {"alive": alive, "begun": begun, "whole": found, "more": more, "left": left}


@contextlib.contextmanager
def regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file. Raises OSError for any failure, also for a symlink or a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def new_bytes(file: BinaryIO, offset: int, end: bytes, *, most: int) -> tuple[int, bytes, int]:
    """Return offset, new bytes and file size; start at 0 if the bytes before `offset` differ from
    `end`."""
    size = os.fstat(file.fileno()).st_size
    file.seek(offset - len(end))
    if file.read(len(end)) != end:
        offset = 0
        file.seek(0)
    return offset, file.read(most), size


def send(
    run_dir: Path, signals: list[int], request: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Signal the run's supervisor if it is alive; write `request` to stop.json for it."""
    alive = is_held(run_dir / "supervisor.lock")
    if alive:
        ends = time.monotonic() + _FIND_S
        while not (found := supervisors(run_dir)) and is_held(run_dir / "supervisor.lock"):
            if time.monotonic() > ends:
                break
            time.sleep(0.05)
        if request is not None:
            # A run can be stopped even if the disk is full or read-only.
            with contextlib.suppress(OSError):
                partial = run_dir / f".stop.json.{os.getpid()}.partial"
                partial.unlink(missing_ok=True)
                with partial.open("x", encoding="utf-8") as file:  # follows no link
                    json.dump({**request, "pids": found}, file)
                partial.replace(run_dir / "stop.json")
        for pid in found:
            for number in signals:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
    return {"alive": alive}


def supervisors(run_dir: Path) -> list[int]:
    """List the run's supervisor processes by their command lines.

    A recorded process ID would not suffice, because it can now belong to another program.
    """
    return [pid for pid, argv in command_lines() if is_supervisor(argv, run_dir)]


def is_supervisor(argv: list[str], run_dir: Path) -> bool:
    """Return whether a command line is the run's supervisor."""
    if "payload.supervise" not in argv or "--run-dir" not in argv[:-1]:
        return False
    return same_folder(argv[argv.index("--run-dir") + 1], run_dir)


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Yield the process ID and argv of every visible process."""
    if Path("/proc/self/cmdline").exists():
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                yield int(entry.name), [os.fsdecode(argument) for argument in argv]
        return
    columns = ["ps", "-A", "-ww", "-o", "pid=", "-o", "command="]
    listed = subprocess.run(columns, capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        pid, _, command = line.strip().partition(" ")
        # ps joins the arguments with spaces, so a folder's name can contain spaces here.
        before, flag, after = command.partition(" --run-dir ")
        yield int(pid), [*before.split(), flag.strip(), after.partition(" --")[0].strip()]


def same_folder(name: str, run_dir: Path) -> bool:
    """Return whether `name` resolves to the run's folder."""
    return os.path.realpath(name) == os.path.realpath(run_dir)


@contextlib.contextmanager
def blocked(numbers: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Block these signals; child processes inherit the mask and can unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def left(run_dir: Path, *, kill: bool) -> dict[str, Any]:
    """Return the run's live processes on this node; with `kill`, send SIGKILL to each."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            zombie = (entry / "stat").read_text("utf-8").rpartition(")")[2].split()[0] == "Z"
            if not zombie and has_mark(entry, run_dir):
                found.append(int(entry.name))
                if kill:
                    os.kill(found[-1], signal.SIGKILL)
    return {"pids": sorted(found)}


def has_mark(entry: Path, run_dir: Path) -> bool:
    """Return whether a process has the environment variable of the run's processes."""
    mark = b"TILEFORGE_RUN_DIR="
    variables = (entry / "environ").read_bytes().split(b"\0")
    values = [each[len(mark) :] for each in variables if each.startswith(mark)]
    return any(same_folder(os.fsdecode(value), run_dir) for value in values)


def state(run_dir: Path) -> dict[str, Any]:
    """Return the content of state.json; empty if it cannot be read."""
    found = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads((run_dir / "state.json").read_text("utf-8"))
    return found if isinstance(found, dict) else {}


def is_held(lock: Path) -> bool:
    """Return whether a live supervisor holds the lock."""
    try:
        # Any kind of file can be opened without blocking.
        descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


if __name__ == "__main__":
    sys.stdout.write(json.dumps(act(json.load(sys.stdin))) + "\n")
