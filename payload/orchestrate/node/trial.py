"""Starts a program on every node through a launcher, for a while, and says how that went.

Runs on the head by python3 alone, from stdin, where its arguments follow, a JSON object:
ssh (its arguments, or none), workers (addresses by name), hosts_file and hosts (its text), argv,
environment, path (folders in front of PATH), without and keeps (beginnings of names that are left
out of the environment, and that are not all the same), deadline_s. Prints a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

_SSH_S = 12
_LEAVE_S = 3
_MOST_BYTES = 256 * 1024


def trial(arguments: dict[str, Any], *, env: Mapping[str, str]) -> dict[str, Any]:
    """Try ssh to every worker, and if all answer, the launcher.

    `unreached` has what ssh said, by worker. `status` is the launcher's, null when it was not
    started or did not end in time.
    """
    unreached = _unreached(arguments["ssh"], arguments["workers"])
    if unreached:
        return {"unreached": unreached, "status": None, "late": False, "stdout": "", "stderr": ""}
    Path(arguments["hosts_file"]).write_text(arguments["hosts"], encoding="ascii")
    left_out, keeps = tuple(arguments["without"]), tuple(arguments["keeps"])
    kept = {
        name: value
        for name, value in env.items()
        if name.startswith(keeps) or not name.startswith(left_out)
    }
    kept["PATH"] = os.pathsep.join([arguments["path"], env.get("PATH", os.defpath)])
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        started = subprocess.Popen(
            arguments["argv"],
            env=kept | arguments["environment"],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        status = _wait(started, deadline_s=arguments["deadline_s"])
        said = {"stdout": _text(stdout), "stderr": _text(stderr)}
    return {"unreached": {}, "status": status, "late": status is None, **said}


def _unreached(ssh: list[str], workers: dict[str, str]) -> dict[str, str]:
    """Return ssh's words by worker: mpirun's own is silent, and names the first node alone."""
    if not ssh or not workers:
        return {}
    with ThreadPoolExecutor(len(workers)) as pool:
        words = pool.map(lambda address: _try_ssh(ssh, address), workers.values())
    return {name: said for name, said in zip(workers, words, strict=True) if said is not None}


def _try_ssh(ssh: list[str], address: str) -> str | None:
    """What ssh complained of, or None."""
    try:
        done = subprocess.run(
            ["ssh", *ssh, "-x", address, "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_SSH_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.decode(errors="replace").strip()
    return None if done.returncode == 0 else said or f"status {done.returncode}"


def _wait(started: subprocess.Popen[bytes], *, deadline_s: float) -> int | None:
    try:
        return started.wait(deadline_s)
    except subprocess.TimeoutExpired:
        pass
    # mpirun is a script; the program that it waits for takes the processes elsewhere along.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGTERM)
        ends = time.monotonic() + _LEAVE_S
        while time.monotonic() < ends:
            started.poll()
            os.killpg(started.pid, 0)
            time.sleep(0.05)
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    return None


def _text(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MOST_BYTES))
    return file.read().decode(errors="replace")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(trial(json.load(sys.stdin), env=os.environ)) + "\n")
