"""Keeps other users from changing the machine code that a process loads."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def own_folder(path: Path) -> Path:
    """Return `path`; create it if missing. Only this user and root can write to it.

    Raises PermissionError for a folder of another user. Exception: the owner of the home folder is
    accepted, because in some containers root uses the home of another user. Raises OSError if the
    folder cannot be created.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_trusted_owner(path):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    if path.stat().st_mode & 0o022:
        path.chmod(0o700)
    return path


def is_own_file(path: Path) -> bool:
    """Return whether the file at `path` exists and no other user can have written it."""
    try:
        return _is_trusted_owner(path) and not path.stat().st_mode & 0o022
    except FileNotFoundError:
        return False


def keep_inductor_home() -> None:
    """Make torch.compile keep its machine code in this user's home.

    By default, torch uses a folder with a known name in the temporary folder. Another user could
    create this folder first, and torch loads code and unpickles graphs from it. If the home folder
    cannot be used, this process gets a new temporary folder. A folder set in the environment is
    kept.
    """
    if os.environ.get(_INDUCTOR):
        return
    try:
        folder = own_folder(Path.home() / ".cache" / "tileforge" / "inductor")
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "it cannot be written", str(folder))
    except (OSError, RuntimeError):  # without a home
        folder = Path(tempfile.mkdtemp(prefix="tileforge-inductor-"))
    os.environ[_INDUCTOR] = str(folder)


def _is_trusted_owner(path: Path) -> bool:
    owner = path.stat().st_uid
    return owner == os.geteuid() or owner == Path.home().stat().st_uid
