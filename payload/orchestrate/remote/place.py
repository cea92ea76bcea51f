"""Looks what a run lacks on this node, and puts the payload's code in its place.

Runs on a node by python3 alone, from stdin, where its arguments follow, a JSON object:
action (look, finish, running); but for running digest (of the code) and files (sha256 by path);
for look also venv, programs (of its bin folder) and wholes (files under ~/tileforge, each the last
one of a folder). Prints a JSON object. Each action may be repeated.
"""

from __future__ import annotations

import ctypes.util
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

# Below Linux' range for outgoing connections (32768 and up), above what services use.
_PORTS = range(20_000, 32_000)
_RUN_ID = re.compile(r"(?!latest\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CHECKPOINT = re.compile(r"step_([0-9]{8,20})")
_TCMALLOC = ("tcmalloc", "tcmalloc_minimal")


def act(arguments: dict[str, Any], *, home: Path) -> dict[str, Any]:
    """Carry out one action in the login's `home`."""
    root = home / "tileforge"
    if arguments["action"] == "running":
        return {"running": running(root / "runs"), "runs": results(root / "runs")}
    if arguments["action"] == "finish":
        return finish(root, arguments["digest"], arguments["files"])
    missing = missing_files(root, arguments["digest"], arguments["files"])
    programs = [Path(arguments["venv"], "bin", name) for name in arguments["programs"]]
    libraries = [ctypes.util.find_library(name) for name in _TCMALLOC]
    return {
        "home": str(home),
        "lacking": [str(path) for path in programs if not os.access(path, os.X_OK)],
        "tcmalloc": next((name for name in libraries if name), None),
        "port": free_port(),
        "running": running(root / "runs"),
        "missing": missing,
        "has": [name for name in arguments["wholes"] if (root / name).is_file()],
    }


def code_folder(root: Path, digest: str, *, whole: bool) -> Path:
    """Where code with this digest is, or is being put together."""
    return root / (f"payload-{digest}" if whole else f".payload-{digest}")


def missing_files(root: Path, digest: str, files: dict[str, str]) -> list[str] | None:
    """What must be sent; the rest is copied from the code of another run. Null: all is there."""
    if code_folder(root, digest, whole=True).is_dir():
        return None
    partial = code_folder(root, digest, whole=False)
    others = sorted(root.glob("payload-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    missing = []
    for name, sha256 in files.items():
        target = partial / name
        if sha256_of(target) == sha256:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        known = next((other / name for other in others if sha256_of(other / name) == sha256), None)
        if known:
            shutil.copyfile(known, target)
        else:
            missing.append(name)
    return missing


def finish(root: Path, digest: str, files: dict[str, str]) -> dict[str, Any]:
    """Give the code its name if every file is what it should be."""
    whole, partial = (code_folder(root, digest, whole=whole) for whole in (True, False))
    wrong = [name for name, sha256 in files.items() if sha256_of(partial / name) != sha256]
    if not wrong and not whole.is_dir():
        partial.rename(whole)
    return {"wrong": [] if whole.is_dir() else wrong}


def sha256_of(path: Path) -> str | None:
    """Of the file's content; null when there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def running(runs: Path) -> str | None:
    """The run that a living supervisor holds, if any."""
    for lock in runs.glob("*/supervisor.lock"):
        try:
            descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.parent.name
        finally:
            os.close(descriptor)
    return None


def results(runs: Path) -> list[dict[str, Any]]:
    """What each run has to lose: its newest whole checkpoint (or empty) and its state's sha256.

    What people have put beside runs and checkpoints, under names of their own, is none of them.
    """
    found = []
    for plan in sorted(runs.glob("*/plan.json")):
        folder = plan.parent
        if not _RUN_ID.fullmatch(folder.name):
            continue
        names = [path.parent.name for path in folder.glob("checkpoints/step_*/manifest.json")]
        steps = {name: int(step[1]) for name in names if (step := _CHECKPOINT.fullmatch(name))}
        state = sha256_of(folder / "state.json")
        newest = max(steps, key=lambda name: steps[name], default="")
        found.append({"run_id": folder.name, "checkpoint": newest, "state": state})
    return found


def free_port() -> int | None:
    """A port where the ranks can meet; the supervisor holds it from its start."""
    for port in random.sample(_PORTS, k=100):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(act(json.load(sys.stdin), home=Path.home())) + "\n")
