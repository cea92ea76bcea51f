"""Makes, installs and removes the keys by which a run's head reaches its workers.

Runs on a node by python3 alone, from stdin, where its arguments follow, a JSON object: an action
and what its function takes. Prints a JSON object. Each action may be repeated. A key is named
`RUN_ID.ATTEMPT`: each attempt to start a run has one of its own. trust and forget also clear away
keys whose time is over: who made them was killed before removing them.
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
# sshd reads it as local time.
_TIME = "%Y%m%d%H%M%S"
_MARK = "tileforge-run:"
_OURS = re.compile(rf".* {_MARK}([A-Za-z0-9][A-Za-z0-9._-]{{0,119}})")
_ENDS = re.compile(r'restrict,.*expiry-time="(\d{14})" ')


def act(arguments: dict[str, Any], *, home: Path) -> dict[str, Any]:
    """Carry out one action in the login's `home`."""
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
        return {"names": dead(runs, home=home, asked=arguments["names"])}
    forget(home, arguments["names"], keeps_names=arguments["keeps_names"])
    return {}


def make(home: Path, name: str) -> dict[str, Any]:
    """Make a key pair; only the public half leaves the machine."""
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
    """Let the key in from the head's addresses, for so long.

    It starts hydra's proxy and the heartbeat, and needs neither a terminal nor forwarding.
    """
    end = time.strftime(_TIME, time.localtime(time.time() + lasts_s))
    line = f'restrict,from="{",".join(sources)}",expiry-time="{end}" {public}'
    with authorized_keys(home) as lines:
        lines[:] = [each for each in lines if name_of(each) != name_of(line)]
        lines.append(line)
    return {}


def forget(home: Path, gone: list[str], *, keeps_names: bool) -> None:
    """Let these keys in no more, and delete them where they were made.

    With `keeps_names`, a key that was made here leaves an empty folder of its name: some worker may
    still let it in, and has to be asked again.
    """
    with authorized_keys(home) as lines:
        lines[:] = [line for line in lines if name_of(line) not in gone]
    for name in gone:
        folder = folders(home) / name
        was_made_here = folder.is_dir()
        shutil.rmtree(folder, ignore_errors=True)
        if keeps_names and was_made_here:
            folder.mkdir(mode=0o700)


def names(home: Path) -> set[str]:
    """Return every key of a run that this node has or lets in."""
    made = {path.name for path in folders(home).glob("*")}
    lines = read(home / ".ssh" / "authorized_keys").split("\n")
    return made | {name for line in lines if (name := name_of(line))}


def dead(runs: Path, *, home: Path, asked: list[str]) -> list[str]:
    """Return those of the `asked` keys that nothing will ever use again; for the head.

    An attempt is alive while it has the claim, and then while its run has a supervisor. It can be
    neither twice, so what is dead here stays so. Only the head that made a key knows of its
    attempt: trusting one, or having files of its run, makes no node its head.
    """
    made = {path.name for path in folders(home).glob("*")}
    claimed = None
    with contextlib.suppress(OSError, ValueError):
        # Who has just begun to hold it has no key yet.
        claimed = json.loads((runs / ".claim.lock").read_text("utf-8"))["name"]
    if not is_held(runs / ".claim.lock"):
        claimed = None
    if runs.is_dir():
        with (runs / ".start.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a supervisor that is being started has no lock yet
    living = {path.parent.name for path in runs.glob("*/supervisor.lock") if is_held(path)}
    return [
        name for name in asked if name in made and name != claimed and run_of(name) not in living
    ]


def run_of(name: str) -> str:
    """Return the run that a key is for; a key of release 0.1 has the run's own name."""
    run_id, _, attempt = name.rpartition(".")
    return run_id if re.fullmatch("[0-9a-f]{8}", attempt) and run_id else name


def is_held(lock: Path) -> bool:
    """Return whether a living process holds the lock."""
    try:
        # Whatever lies there, opening it neither blocks nor fails for being no file.
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
    """Return where this login comes from: to a worker one comes through the head."""
    return as_ip(os.environ["SSH_CONNECTION"].split()[0])


def own_addresses(address: str) -> list[str]:
    """Return where this machine's own connections to its `address` come from."""
    found = ["127.0.0.1", "::1"]
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(address, 22, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            found += as_ip(probe.getsockname()[0])
    return found


def as_ip(text: str) -> list[str]:
    """Return the address, if it is one: sshd asks for no names."""
    try:
        return [str(ipaddress.ip_address(text.partition("%")[0]))]
    except ValueError:
        return []


def folders(home: Path) -> Path:
    """Return where a head has its runs' keys."""
    return home / ".ssh" / "tileforge"


def name_of(line: str) -> str | None:
    """Return the name of a key of ours in authorized_keys."""
    found = _OURS.fullmatch(line)
    return found[1] if found else None


def has_ended(line: str) -> bool:
    """Return whether this is a key of ours that sshd does not take any more."""
    found = _ENDS.match(line)
    return name_of(line) is not None and found is not None and found[1] <= time.strftime(_TIME)


def read(path: Path) -> str:
    """Return the file's text; lines that are not ours stay as they are, whatever they hold."""
    try:
        return path.read_text("utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def authorized_keys(home: Path) -> Iterator[list[str]]:
    """Yield the file's lines, to be changed; the new file replaces the old one as a whole."""
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
