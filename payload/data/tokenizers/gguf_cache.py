"""Folders in the user's cache with what a GGUF file was converted to, made once."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from payload.core.errors import CheckpointError
from payload.core.file_hash import sha256_of

_RECIPE = "2"
"""Part of a folder's name; raise it when a conversion changes."""


def converted(
    path: Path, *, kind: str, build: Callable[[Path], None], cache: Path | None = None
) -> Path:
    """Return the folder of this kind for a file's content, filled by `build` if it is not there.

    `cache` keeps it; None is beside what the hub's client keeps. Raises CheckpointError.
    """
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. Name a file that can be read.") from None
    cache = _default_cache() if cache is None else cache
    folder = cache / f"{digest[:32]}-{kind}-{_RECIPE}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=cache))
    except OSError as error:
        raise CheckpointError(
            f"{cache}: {error.strerror}. What a GGUF file is converted to is kept there; set "
            "HF_HOME to a folder that can be written."
        ) from None
    try:
        build(partial)
        # Another process may have been faster; its folder has the same content.
        if not folder.is_dir():
            partial.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: {error.strerror or error}. Free space.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def alone(path: Path) -> Iterator[Path]:
    """Yield a link to a GGUF file in a folder without any other file.

    transformers reads a tokenizer.json, an adapter or a config beside a GGUF file in place of what
    the file has, and the cache knows the file's content alone. Raises OSError.
    """
    with tempfile.TemporaryDirectory(prefix="tileforge-gguf-") as folder:
        link = Path(folder) / f"model{path.suffix}"
        link.symlink_to(path.resolve())
        yield link


def _default_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "tileforge-gguf"
