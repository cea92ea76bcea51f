"""Creates, authorizes and revokes the SSH keys with which a run's head reaches its workers.

Runs on a node with python3 only. The program is read from stdin, followed by its arguments as a
JSON object: an action and the arguments of its function. Prints a JSON object. All actions are
idempotent. A key is named `RUN_ID.ATTEMPT`, because each attempt to start a run has its own key.
The actions trust and forget also remove expired keys, which killed operators left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KEYGEN_S = 20
# Format of sshd's expiry-time, which is in local time.
_TIME = "%Y%m%d%H%M%S"
_MARK = "tileforge-run:"
_OURS = re.compile(rf".* {_MARK}([A-Za-z0-9][A-Za-z0-9._-]{{0,119}})")
_ENDS = re.compile(r'restrict,.*expiry-time="(\d{14})" ')


def act(arguments: dict[str, Any], *, home: Path) -> dict[str, Any]:
    """Run one action in the login's `home`."""
    action = arguments["action"]
    if action == "make":
        return make(home, arguments["name"])
    if action == "trust":
        sources = own_addresses(arguments["head"]) if arguments["is_head"] else callers()
        sources = sorted({*sources, *as_ip(arguments["head"])})
        return trust(home, arguments["public"], sources=sources, lasts_s=arguments["lasts_s"])
    if action == "names":
        return {"names": sorted(names(home))}
    if action == "dead":
        runs = home / arguments["folder"] / "runs"
        return {"names": stale(runs, home=home, candidates=arguments["names"])}
    revoke(home, arguments["names"], keeps_names=arguments["keeps_names"])
    return {}


def make(home: Path, name: str) -> dict[str, Any]:
    """Create a key pair and return the public half; the private half stays on this machine."""
    folder = folders(home) / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = folder / "id_ed25519"
    if not key.with_suffix(".pub").exists():
        key.unlink(missing_ok=True)
        mark = f"{_MARK}{name}"
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", mark, "-f", str(key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=_KEYGEN_S)
    public = key.with_suffix(".pub").read_text(encoding="ascii").strip()
    return {"folder": str(folder), "public": public}


def trust(home: Path, public: str, *, sources: list[str], lasts_s: float) -> dict[str, Any]:
    """Authorize the key from the head's addresses for `lasts_s` seconds.

    The head uses the key to start hydra's proxy and the heartbeat. These programs need no terminal
    and no forwarding.
    """
    end = time.strftime(_TIME, time.localtime(time.time() + lasts_s))
    line = f'restrict,from="{",".join(sources)}",expiry-time="{end}" {public}'
    with authorized_keys(home) as lines:
        lines[:] = [each for each in lines if name_of(each) != name_of(line)]
        lines.append(line)
    return {}


def revoke(home: Path, revoked: list[str], *, keeps_names: bool) -> None:
    """Remove these keys from authorized_keys, and delete the key files that this node created.

    With `keeps_names`, keep an empty folder with the name of each key that this node created. A
    worker may still accept the key, so the revocation must be retried.
    """
    with authorized_keys(home) as lines:
        lines[:] = [line for line in lines if name_of(line) not in revoked]
    for name in revoked:
        folder = folders(home) / name
        was_created_here = folder.is_dir()
        shutil.rmtree(folder, ignore_errors=True)
        if keeps_names and was_created_here:
            folder.mkdir(mode=0o700)


def names(home: Path) -> set[str]:
    """Return the names of the runs' SSH keys that this node created or authorizes."""
    created = {path.name for path in folders(home).glob("*")}
    lines = read(home / ".ssh" / "authorized_keys").split("\n")
    return created | {name for line in lines if (name := name_of(line))}


def stale(runs: Path, *, home: Path, candidates: list[str]) -> list[str]:
    """Return the candidates that this head created and that no attempt will use again.

    A key is in use while its attempt holds the claim, and later while the run has a supervisor. An
    attempt never returns to these states, so a stale key stays stale. Only the head that created a
    key can make this decision. Other nodes may also authorize the key or have files of the run.
    """
    created = {path.name for path in folders(home).glob("*")}
    claimed = None
    with contextlib.suppress(OSError, ValueError):
        # A new holder that has not written its name yet has not created a key either.
        claimed = json.loads((runs / ".claim.lock").read_text("utf-8"))["name"]
    if not is_held(runs / ".claim.lock"):
        claimed = None
    if runs.is_dir():
        with (runs / ".start.lock").open("w") as lock:
            # Wait for a supervisor that is starting, because it does not hold its lock yet.
            fcntl.flock(lock, fcntl.LOCK_EX)
    live = {path.parent.name for path in runs.glob("*/supervisor.lock") if is_held(path)}
    return [
        name
        for name in candidates
        if name in created and name != claimed and run_of(name) not in live
    ]


def run_of(name: str) -> str:
    """Return the ID of the run that a key is for; in release 0.1 the key's name was the run ID."""
    run_id, _, attempt = name.rpartition(".")
    return run_id if re.fullmatch("[0-9a-f]{8}", attempt) and run_id else name


def is_held(lock: Path) -> bool:
    """Return whether a live process holds the lock."""
    try:
        # Any kind of file can be opened without blocking.
        descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def callers() -> list[str]:
    """Return the source address of this login; on a worker, this is the head's address."""
    return as_ip(os.environ["SSH_CONNECTION"].split()[0])


def own_addresses(address: str) -> list[str]:
    """Return the source addresses of connections from this machine to its own `address`."""
    found = ["127.0.0.1", "::1"]
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(address, 22, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            found += as_ip(probe.getsockname()[0])
    return found


def as_ip(text: str) -> list[str]:
    """Return the address, or an empty list for a name, because sshd does not resolve names."""
    try:
        return [str(ipaddress.ip_address(text.partition("%")[0]))]
    except ValueError:
        return []


def folders(home: Path) -> Path:
    """Return the folder that has the keys which this node created as head."""
    return home / ".ssh" / "tileforge"


def name_of(line: str) -> str | None:
    """Return the name of a run key on a line of authorized_keys, or None for another line."""
    found = _OURS.fullmatch(line)
    return found[1] if found else None


def has_ended(line: str) -> bool:
    """Return whether the line is an expired run key."""
    found = _ENDS.match(line)
    return name_of(line) is not None and found is not None and found[1] <= time.strftime(_TIME)


def read(path: Path) -> str:
    """Return the file's text; bytes that are not UTF-8 survive a later write."""
    try:
        return path.read_text("utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def authorized_keys(home: Path) -> Iterator[list[str]]:
    """Yield the lines of authorized_keys for editing, then replace the file atomically."""
    folder = home / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "authorized_keys"
    with (folder / ".tileforge.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = read(path)
        lines = before.split("\n")
        if not lines[-1]:
            lines.pop()
        for name in [name_of(line) or "" for line in lines if has_ended(line)]:
            shutil.rmtree(folders(home) / name, ignore_errors=True)
        lines[:] = [line for line in lines if not has_ended(line)]
        yield lines
        after = "".join(f"{line}\n" for line in lines)
        if after == before:
            return
        fresh = folder / ".authorized_keys.tileforge"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path.resolve())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(act(json.load(sys.stdin), home=Path.home())) + "\n")
