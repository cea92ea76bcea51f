"""Temporary folders in memory: a disk takes milliseconds to overwrite a file."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import psutil

_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 8 * 2**30
"""A session writes less than 2 GiB; the rest is for the ranks of the tests, and for a rig."""
# pytest's own setting, which keeps unique names and the removal of older sessions' folders.
_ROOT = "PYTEST_DEBUG_TEMPROOT"


def use_memory() -> None:
    """Make pytest create `tmp_path` and similar folders in memory, if there is enough room.

    The user's own setting stays in force (`PYTEST_DEBUG_TEMPROOT`, --basetemp).
    """
    if _ROOT not in os.environ and _has_room():
        os.environ[_ROOT] = str(_MEMORY)


def use_own_state() -> None:
    """Isolate the tests from this user's state of the program, in one folder per session."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # pytest-xdist's controller has made the folder
        folder = tempfile.mkdtemp(prefix="tileforge-state.")
        os.environ["XDG_STATE_HOME"] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _has_room() -> bool:
    if not os.access(_MEMORY, os.W_OK):
        return False
    free_bytes = shutil.disk_usage(_MEMORY).free
    return min(free_bytes, psutil.virtual_memory().available) > _ROOM_BYTES
