"""A cache of what is made once and kept between runs: each thing a folder, whole or absent."""

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
    """Where root images and wheels are."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tileforge" / "rig"


def cached(kind: str, *, recipe: Sequence[str], build: Callable[[Path], None]) -> Path:
    """The folder made by `build` from `recipe`; made now if it is not there.

    Another process that wants the same waits. Folders of the kind that follow other recipes stay
    for a week after their last use: a rig of another checkout may run from them.
    """
    key = hashlib.sha256(json.dumps(list(recipe)).encode()).hexdigest()[:16]
    folder = cache_dir() / f"{kind}-{key}"
    cache_dir().mkdir(parents=True, exist_ok=True)
    with locked(cache_dir() / f"{kind}.lock"):
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.partial")
            if partial.exists():
                # debootstrap, if it was killed, leaves /proc and /sys mounted.
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
    """Holds the file's lock; waits for it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
