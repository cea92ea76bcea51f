"""Places in the copy of a run that is elsewhere; whatever lies there is not written through."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from payload.core.errors import ConfigError, UsageError
from payload.core.files import set_aside
from payload.run_record.run_files import RunPaths


def inside(paths: RunPaths, name: str) -> Path:
    """Return a file's place in the run folder, and make the folders on the way.

    What lies in such a folder's place is set aside. Raises ConfigError when a part of the way is a
    symlink, which could lead out of the folder, or cannot be made, and UsageError when the run's
    folder is gone.
    """
    path = paths.root
    _refuse_link(path)
    if not path.is_dir():
        raise UsageError(
            f"{path}, the copy of the run, was removed. Make it again: attach to the run with "
            "--inventory."
        )
    for part in PurePosixPath(name).parts:
        make_folder(path)
        path = path / part
        _refuse_link(path)
    return path


def make_folder(path: Path) -> None:
    """Make a folder of the copy where there is none, whatever lies there. Raises ConfigError."""
    try:
        set_aside_no_folder(path)
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(error, path) from None


def set_aside_no_folder(path: Path) -> None:
    """Set aside what lies in a folder's place and is none. Raises OSError."""
    if os.path.lexists(path) and not path.is_dir():
        set_aside(path)


def unwritable(error: OSError, path: Path) -> ConfigError:
    """Return the error for a place in the copy that cannot be written."""
    return ConfigError(
        f"{error.filename or path}: the run's copy cannot be written ({error.strerror}). Free disk "
        "space, or move away what is in its place."
    )


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a symlink: a run's copy is neither read nor written through one. Move it "
            "away."
        )
