"""A cache between test runs: each entry is a folder, complete or absent."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.rig.host import mounts_below, run

_KEPT_S = 7 * 24 * 3600


def cache_dir() -> Path:
    """Return the folder of root images and wheels."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tileforge" / "rig"


def cached(kind: str, *, recipe: Sequence[str], build: Callable[[Path], None]) -> Path:
    """Return the folder that `build` makes from `recipe`, and make it if it is missing.

    Another process that needs the same folder waits. Folders of the same kind from other recipes
    stay for a week after their last use, as a rig of another checkout can run from them.
    """
    key = hashlib.sha256(json.dumps(list(recipe)).encode()).hexdigest()[:16]
    folder = cache_dir() / f"{kind}-{key}"
    cache_dir().mkdir(parents=True, exist_ok=True)
    with locked(cache_dir() / f"{kind}.lock"):
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.partial")
            if partial.exists():
                # A killed debootstrap leaves /proc and /sys mounted.
                for mount in mounts_below(partial):
                    run(["umount", mount])
                shutil.rmtree(partial)
            partial.mkdir()
            build(partial)
            partial.rename(folder)
        os.utime(folder)
        for other in cache_dir().glob(f"{kind}-*"):
            if time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the file's lock and hold it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
