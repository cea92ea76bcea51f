"""Checks paths in the local copy of a remote run, so that no write follows a symlink."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from payload.core.errors import ConfigError, UsageError
from payload.core.files import move_aside
from payload.run_record.run_files import RunPaths


def path_in_copy(paths: RunPaths, name: str) -> Path:
    """Return the path of a file in the run folder, after creating its parent folders.

    Anything that blocks a parent folder is moved aside. Raises ConfigError if a parent folder
    cannot be created or is a symlink, which could lead out of the run folder. Raises UsageError if
    the run folder is gone.
    """
    path = paths.root
    _refuse_link(path)
    if not path.is_dir():
        raise UsageError(
            f"{path}, the local copy of the run, was removed. To copy the run again, attach to it "
            "with --inventory."
        )
    for part in PurePosixPath(name).parts:
        make_folder(path)
        path = path / part
        _refuse_link(path)
    return path


def make_folder(path: Path) -> None:
    """Create a folder of the copy, moving aside anything at its path. Raises ConfigError."""
    try:
        move_aside_non_folder(path)
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(error, path) from None


def move_aside_non_folder(path: Path) -> None:
    """Move aside anything at `path` that is not a folder. Raises OSError."""
    if os.path.lexists(path) and not path.is_dir():
        move_aside(path)


def unwritable(error: OSError, path: Path) -> ConfigError:
    """Return the error for a path in the copy that cannot be written."""
    return ConfigError(
        f"{error.filename or path}: the run's copy cannot be written ({error.strerror}). Free disk "
        "space, or move away the file that blocks it."
    )


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a symlink, and the copy of a run is neither read nor written through "
            "symlinks. Move the symlink away."
        )
