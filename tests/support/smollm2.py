"""SmolLM2-135M-Instruct for tests, and the cache of what tests download."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from payload.first_run.packaged_model import GGUF_NAME, cache_folder, fetch_gguf, model_folder


def smollm2_folder() -> Path:
    """Return the model's folder in the Hugging Face layout, as `make run` converts it.

    Read-only for tests.
    """
    return model_folder(cache_folder(os.environ))


def smollm2_gguf() -> Path:
    """Return the GGUF file (Q4_1) that the folder is converted from."""
    return kept("smollm2-135m-instruct-gguf", _fetch) / GGUF_NAME


def _fetch(folder: Path) -> None:
    fetch_gguf(folder)


def cache_dir() -> Path:
    """Return the folder that caches the downloads of tests."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tileforge" / "tests"


def kept(name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder `name` of the cache; `build` fills a missing one."""
    folder = cache_dir() / name
    if folder.is_dir():
        return folder
    cache_dir().mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir() / f"{name}.lock"):
        # Another worker of pytest-xdist may have built it during the wait for the lock.
        if not folder.is_dir():
            partial = folder.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            build(partial)
            partial.rename(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
