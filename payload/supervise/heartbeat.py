"""`python -m payload.supervise.heartbeat`: sends a node's heartbeats to the supervisor.

Prints a JSON object every second. `now` and `monotonic_s` are the clocks of this node. `progress`,
`exits` and `states` (process states in the kernel's one-letter form) describe the node's ranks.
`folders` are shared folders that do not answer on this node.

Reads one command per line. `ping` means that the supervisor is alive. `stop:PID` sends SIGTERM to a
process of the run; a repeated PID is ignored. `end:N` kills the run's processes on this node and
adds `ended` (ids of processes that did not exit) and `asked` (N) to the output; a repeated N is
ignored. Exits at the end of stdin. If the supervisor is silent for too long, this program kills the
run's processes on this node, because no other process can do so.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from payload.core.suggested_commands import command
from payload.run_record.run_files import RankExit, RankProgress, RunPaths, last_record
from payload.supervise.processes import kill_until_none, signal_process
from payload.supervise.shared_folders import FolderWatch

EVERY_S = 1.0
"""Interval of the heartbeats."""

_Record = TypeVar("_Record", RankProgress, RankExit)
_KILL_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Send heartbeats until the supervisor is gone."""
    parser = argparse.ArgumentParser(prog=command("supervise.heartbeat"))
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--lifeline", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--folder", action="append", default=[], metavar="DIR")
    arguments = parser.parse_args(argv)
    paths = RunPaths(arguments.run_dir)
    watch = FolderWatch(arguments.folder, env=os.environ)
    try:
        return _send_heartbeats(paths, watch, lifeline_s=arguments.lifeline)
    finally:
        watch.close()


def _send_heartbeats(paths: RunPaths, watch: FolderWatch, *, lifeline_s: float) -> int:
    """Send heartbeats until the supervisor is gone or silent for `lifeline_s`."""
    heard_s, due_s, done, stopped = time.monotonic(), time.monotonic(), b"", b""
    while time.monotonic() - heard_s < lifeline_s:
        extra: dict[str, Any] = {}
        folders = {"folders": watch.troubles()}
        if select.select([0], [], [], max(0.0, due_s - time.monotonic()))[0]:
            heard_s = time.monotonic()
            commands = os.read(0, 4096).split()
            if not commands:
                return 0
            stop = _last(commands, b"stop:", before=stopped)
            if stop != stopped:
                stopped = stop
                pid = int(stop.removeprefix(b"stop:"))
                signal_process(pid, signal.SIGTERM, run_dir=paths.root)
            request = _last(commands, b"end:", before=done)
            if request != done:
                done = request
                extra["ended"] = sorted(kill_until_none(paths.root, timeout_s=_KILL_S))
                extra["asked"] = int(request.removeprefix(b"end:"))
            # An answer to every message would make the head send the next one immediately, in an
            # endless loop.
            if not extra and time.monotonic() < due_s:
                continue
        due_s = time.monotonic() + EVERY_S
        try:
            sys.stdout.write(json.dumps(heartbeat(paths) | folders | extra) + "\n")
            sys.stdout.flush()
        except OSError:
            return 0
    kill_until_none(paths.root, timeout_s=_KILL_S)
    return 0


def _last(commands: Sequence[bytes], name: bytes, *, before: bytes) -> bytes:
    """Return the last command that begins with `name`, or `before` if no command does."""
    return next((each for each in reversed(commands) if each.startswith(name)), before)


def heartbeat(paths: RunPaths) -> dict[str, Any]:
    """Return this node's report about its ranks."""
    progress = records(RankProgress, paths.rank_progress(0).parent)
    return {
        "now": time.time(),
        "monotonic_s": time.monotonic(),
        "progress": [asdict(record) for record in progress],
        "exits": [asdict(record) for record in records(RankExit, paths.rank_exit(0).parent)],
        "states": {str(record.rank): process_state(record.pid) for record in progress},
    }


def records(cls: type[_Record], folder: Path) -> list[_Record]:
    """Return all readable records in a folder; ranks may replace a record at any time."""
    found = []
    for path in sorted(folder.glob("rank_*.json")):
        record = last_record(cls, path)
        if record is not None:
            found.append(record)
    return found


def process_state(pid: int) -> str | None:
    """Return the kernel's letter for the state of a process, such as `T` for stopped.

    Returns None if the process or /proc does not exist.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
