"""Folders of machine code that a process loads, and in which no other user may have put it."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def own_folder(path: Path) -> Path:
    """Return `path`, made if need be, where nobody but this user and root may write.

    Raises PermissionError for another user's folder. One that belongs to whoever has the home
    folder is taken: root has such a home in some containers. Raises OSError where it cannot be
    made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_trusted_owner(path):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    if path.stat().st_mode & 0o022:
        path.chmod(0o700)
    return path


def is_own_file(path: Path) -> bool:
    """Return whether the file at `path` is there, and none but this user may have written it."""
    try:
        return _is_trusted_owner(path) and not path.stat().st_mode & 0o022
    except FileNotFoundError:
        return False


def keep_inductor_home() -> None:
    """Let torch.compile keep its machine code in this user's home.

    By default that is a folder of a known name in the temporary one, which another user may have
    made before: torch loads the code, and unpickles the graphs, that it finds there. Where the home
    folder cannot be used, this process gets a new temporary one. A folder that the environment
    names is taken as it is.
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
