"""One rank that trains all golden runs in turn: `driver.py CODE JOBS`.

The file JOBS has the trainer's arguments for each run. The driver must work with any commit, so it
only imports the trainer's `main` from the folder CODE. If the commit lacks this function, each run
is a separate process.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import random
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Main = Callable[[Sequence[str], Mapping[str, str]], Any]
_PORTS = (12_000, 32_000)
"""Range of ports, below Linux' default range for outgoing connections."""
_POLL_S = 0.01


def train_all(code: Path, jobs: Path) -> None:
    """Train all jobs with the trainer in the folder `code`."""
    package = importlib.import_module("payload")
    (found,) = map(Path, package.__path__)
    if not found.resolve().is_relative_to(code.resolve()):
        raise SystemExit(f"error: `payload` was imported from {found}, not from {code}.")
    main = find_main()
    for number, argv in enumerate(json.loads(jobs.read_text(encoding="utf-8"))):
        print(f"== {' '.join(argv)}", file=sys.stderr, flush=True)
        if "RANK" in os.environ:
            os.environ["MASTER_PORT"] = _agreed_port(jobs.with_suffix(f".{number}.port"))
        if main is None:
            command = [sys.executable, "-m", "payload.train", *argv]
            subprocess.run(command, cwd=code, check=True)
            continue
        status = main(argv, os.environ)
        if status:
            raise SystemExit(f"error: the trainer returned {status}.")
        _forget_ranks()


def _agreed_port(path: Path) -> str:
    """Return a free port, which rank 0 chooses; the others read it from the file `path`."""
    if os.environ["RANK"] == "0":
        partial = path.with_suffix(".partial")
        partial.write_text(str(_free_port()), encoding="utf-8")
        partial.replace(path)
    while not path.exists():
        time.sleep(_POLL_S)
    return path.read_text(encoding="utf-8")


def _free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def find_main() -> Main | None:
    """Return the trainer's `main(argv, env)`, or None if this commit lacks it."""
    try:
        main: Main = importlib.import_module("payload.train.__main__").main
        inspect.signature(main).bind([], {})
    except (ImportError, AttributeError, TypeError):
        return None
    return main


def _forget_ranks() -> None:
    """Reset the state that libraries keep in this process about the last run's ranks."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
    if comm := sys.modules.get("deepspeed.comm.comm"):
        vars(comm)["cdb"] = None
        sys.modules["deepspeed.utils.groups"]._release_process_group_references(group=None)


if __name__ == "__main__":
    exit_code = 0
    try:
        train_all(Path(sys.argv[1]), Path(sys.argv[2]))
    except BaseException:
        # Printed here: torch replaces the hook for uncaught exceptions.
        traceback.print_exc()
        exit_code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Torch's threads can abort an interpreter during a regular exit.
    os._exit(exit_code)
