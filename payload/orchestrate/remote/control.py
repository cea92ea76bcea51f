"""Starts, reads and ends one run on the node it runs on.

Runs on a node as `python3 -I - ARGUMENTS`, with this text on stdin; ARGUMENTS is a JSON object:
action (start, read, signal, left), run_dir, and what the action's function takes. Prints a JSON
object.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_START_S = 30.0
_MOST_BYTES = 4 * 2**20
_WHOLE = ("state.json", "summary.json", "progress/*.json", "exits/*.json")
_GROWING = ("metrics.jsonl", "logs/*.log")


def act(arguments: dict[str, Any]) -> dict[str, Any]:
    """Carry out one action."""
    run_dir = Path(arguments["run_dir"])
    action = arguments["action"]
    if action == "start":
        return start(run_dir, arguments["argv"], arguments["python_path"])
    if action == "read":
        return read(run_dir, arguments["known"])
    if action == "signal":
        return send(run_dir, arguments["signals"], arguments.get("wish"))
    return left(run_dir, kill=arguments["kill"])


def start(run_dir: Path, argv: list[str], python_path: str) -> dict[str, Any]:
    """Start the supervisor in a session of its own, unless a run is under way on this node.

    `pid` when it is at work; `running` names the other run; else `status` and what it `said`.
    """
    with (run_dir.parent / ".start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for other in run_dir.parent.glob("*/supervisor.lock"):
            if is_held(other):
                return {"running": other.parent.name}
        (run_dir / "logs").mkdir(exist_ok=True)
        with (run_dir / "logs" / "supervisor.log").open("ab") as log:
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
        said = (run_dir / "logs" / "supervisor.log").read_text("utf-8", errors="replace").strip()
        return {"status": supervisor.wait(), "said": said.rpartition("\n")[2]}


def read(
    run_dir: Path, known: dict[str, tuple[int, str]], *, most_bytes: int = _MOST_BYTES
) -> dict[str, Any]:
    """Small files whole, and of growing ones what the caller does not have.

    `known` has, by name, how many bytes the caller has and the last of them, as base64: where those
    are not the same here, the file is another one and comes from its start. One answer has so much;
    `left` are the bytes that it has no room for.
    """
    alive = is_held(run_dir / "supervisor.lock")
    whole = {}
    for pattern in _WHOLE:
        for path in run_dir.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                whole[str(path.relative_to(run_dir))] = path.read_text("utf-8")
    more = {}
    room = most_bytes
    left = 0
    for pattern in _GROWING:
        for path in sorted(run_dir.glob(pattern)):
            name = str(path.relative_to(run_dir))
            offset, end = known.get(name, (0, ""))
            offset, content, size = new_bytes(path, offset, base64.b64decode(end), most=room)
            room -= len(content)
            left += max(0, size - offset - len(content))
            more[name] = [offset, base64.b64encode(content).decode()]
    return {"alive": alive, "whole": whole, "more": more, "left": left}


def new_bytes(path: Path, offset: int, end: bytes, *, most: int) -> tuple[int, bytes, int]:
    """What follows `offset`, before which is `end`; else the file from its start. And its size."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset - len(end))
        if file.read(len(end)) != end:
            offset = 0
            file.seek(0)
        return offset, file.read(most), size


def send(run_dir: Path, signals: list[int], wish: dict[str, Any] | None = None) -> dict[str, Any]:
    """Signals to the run's supervisor if it lives; it finds `wish` in stop.json."""
    alive = is_held(run_dir / "supervisor.lock")
    if alive:
        if wish is not None:
            partial = run_dir / f".stop.json.{os.getpid()}.partial"
            partial.write_text(json.dumps(wish), "utf-8")
            partial.replace(run_dir / "stop.json")
        for number in signals:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state(run_dir)["supervisor_pid"], number)
    return {"alive": alive}


def left(run_dir: Path, *, kill: bool) -> dict[str, Any]:
    """Living processes of the run on this node, after killing them if `kill`."""
    mark = f"TILEFORGE_RUN_DIR={run_dir}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            zombie = (entry / "stat").read_text("utf-8").rpartition(")")[2].split()[0] == "Z"
            if mark in (entry / "environ").read_bytes().split(b"\0") and not zombie:
                found.append(int(entry.name))
                if kill:
                    os.kill(found[-1], signal.SIGKILL)
    return {"pids": sorted(found)}


def state(run_dir: Path) -> dict[str, Any]:
    """state.json, or an empty object."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((run_dir / "state.json").read_text("utf-8"))
        return found
    return {}


def is_held(lock: Path) -> bool:
    """Whether a living supervisor holds the lock."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


if __name__ == "__main__":
    sys.stdout.write(json.dumps(act(json.loads(sys.argv[1]))) + "\n")
