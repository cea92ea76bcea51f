"""Makes, installs and removes the key by which a run's head reaches its workers.

Runs on a node as `python3 -I - ARGUMENTS`, with this text on stdin; ARGUMENTS is a JSON object:
action (make, trust, forget), run_id, and for trust the key's public half and, where it is not to
be trusted for longer, `lasts_s`. Prints a JSON object. Each action may be repeated. trust and
forget also clear away keys whose time is over: who made them was killed before removing them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_KEYGEN_S = 20
# sshd reads it as local time.
_TIME = "%Y%m%d%H%M%S"
_LASTS = re.compile(r'restrict,expiry-time="(\d{14})" .* tileforge-run:(\S+)')


def act(arguments: dict[str, Any], *, home: Path) -> dict[str, Any]:
    """Carry out one action in the login's `home`."""
    run_id = arguments["run_id"]
    folders = home / ".ssh" / "tileforge"
    folder = folders / run_id
    mark = f"tileforge-run:{run_id}"
    if arguments["action"] == "make":
        return make(folder, mark=mark)
    with authorized_keys(home) as lines:
        over = {line: name for line in lines if (name := ended(line))}
        lines[:] = [line for line in lines if line not in over and line.split()[-1:] != [mark]]
        if arguments["action"] == "trust":
            # It starts hydra's proxy, and needs neither a terminal nor forwarding.
            options = "restrict"
            if "lasts_s" in arguments:
                end = time.localtime(time.time() + arguments["lasts_s"])
                options += f',expiry-time="{time.strftime(_TIME, end)}"'
            lines.append(f"{options} {arguments['public']}")
    for name in over.values():
        shutil.rmtree(folders / name, ignore_errors=True)
    if arguments["action"] == "forget":
        shutil.rmtree(folder, ignore_errors=True)
    return {"folder": str(folder)}


def ended(line: str) -> str | None:
    """The run of a key of ours that sshd does not take any more."""
    found = _LASTS.fullmatch(line)
    if found is None or found[1] > time.strftime(_TIME):
        return None
    return found[2]


def make(folder: Path, *, mark: str) -> dict[str, Any]:
    """A key pair in `folder`; only the public half leaves the machine."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = folder / "id_ed25519"
    if not key.with_suffix(".pub").exists():
        key.unlink(missing_ok=True)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", mark, "-f", str(key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=_KEYGEN_S)
    public = key.with_suffix(".pub").read_text(encoding="ascii").strip()
    return {"folder": str(folder), "public": public}


@contextmanager
def authorized_keys(home: Path) -> Iterator[list[str]]:
    """The file's lines, to be changed; the new file takes the old one's place as a whole."""
    folder = home / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "authorized_keys"
    with (folder / ".tileforge.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = before.splitlines()
        yield lines
        after = "".join(f"{line}\n" for line in lines)
        if after == before:
            return
        fresh = folder / ".authorized_keys.tileforge"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path.resolve())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(act(json.loads(sys.argv[1]), home=Path.home())) + "\n")
