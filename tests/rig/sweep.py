"""Searches machines for leaks: keys, tokens, processes, loose file modes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from tests.rig.machine import Machine

# Files of Debian and of the environment, which bootstrap does not change.
_PACKAGED = tuple(f"usr/{name}" for name in ("bin", "include", "lib", "libexec", "sbin", "share"))
_NOT_OURS = (*_PACKAGED, "opt/tileforge/venv")
# Not on the disk, and so not in the overlay.
_IN_MEMORY = ("run", "tmp", "dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of a machine."""

    pid: int
    user: str
    command: str
    environment: bytes


def key_needles(name: str, text: bytes) -> dict[str, bytes]:
    """Return the traces of an ed25519 key: lines of its file, and its 32 bytes, raw and in hex."""
    key = load_ssh_private_key(text, password=None)
    assert isinstance(key, Ed25519PrivateKey)
    seed = key.private_bytes_raw()
    # All keys without a passphrase have the same first line after the header.
    lines = [line for line in text.splitlines()[2:-1] if len(line) > 40]
    found = {f"{name}, {line[:8].decode()}...": line for line in lines}
    return {**found, f"{name}, bytes": seed, f"{name}, hex": seed.hex().encode()}


def files_on(machine: Machine) -> Iterator[tuple[str, Path]]:
    """Yield every file that the machine wrote since its image, by the machine's path."""
    upper = machine.folder / "disk" / "upper"
    yield from _files(upper, skip=_NOT_OURS)
    for folder in _IN_MEMORY:
        for name, path in _files(machine.live_root() / folder):
            yield f"{folder}/{name}", path


def files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file below a folder of this host, by its path in the folder."""
    return _files(folder)


def holders(files: Iterable[tuple[str, Path]], needles: Mapping[str, bytes]) -> dict[str, set[str]]:
    """Return the needles in each file that has any."""
    found: dict[str, set[str]] = {}
    for name, path in files:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue  # a run creates and removes files
        names = {needle for needle, value in needles.items() if value in content}
        if names:
            found[name] = names
    return found


def processes_of(machine: Machine) -> list[Process]:
    """Return all running processes."""
    found = []
    for pid in machine.pids():
        entry = Path(f"/proc/{pid}")
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            environment = (entry / "environ").read_bytes()
            uid = entry.stat().st_uid
        except (FileNotFoundError, ProcessLookupError):
            continue
        if command:
            user = machine.user_name(uid)
            found.append(Process(pid=pid, user=user, command=command, environment=environment))
    return found


def mode_of(path: Path) -> str:
    """Return the mode as chmod reads it, such as `600`."""
    return f"{stat.S_IMODE(path.stat().st_mode):o}"


def writable_by_others(folder: Path) -> list[str]:
    """Return files and folders that other users than their owner can write to."""
    everything = [folder, *folder.rglob("*")]
    loose = [path for path in everything if not path.is_symlink() and path.stat().st_mode & 0o022]
    return [str(path) for path in loose]


def _files(folder: Path, *, skip: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    left_out = {folder / name for name in skip}
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(here, name) not in left_out]
        for name in names:
            path = Path(here, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield str(path.relative_to(folder)), path
