"""Caches files that were converted from GGUF files, in folders of the user's cache."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from payload.core.errors import CheckpointError
from payload.core.file_hash import sha256_of
from payload.core.files import make_shared

_RECIPE = "4"
"""Version of the conversion, which is part of a folder's name. Increase it when a conversion
changes."""


def converted(
    path: Path, *, kind: str, build: Callable[[Path], None], cache: Path | None = None
) -> Path:
    """Return the cached folder of this kind for the content of a file.

    `build` fills the folder if it is new.

    `cache` is the parent folder. By default, the parent folder is next to the hub's cache. Raises
    CheckpointError.
    """
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. Use a readable file.") from None
    cache = _default_cache() if cache is None else cache
    folder = cache / f"{digest[:32]}-{kind}-{_RECIPE}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=cache))
    except OSError as error:
        raise CheckpointError(
            f"{cache}: {error.strerror}. Converted GGUF files are cached there. Set HF_HOME to a "
            "writable folder."
        ) from None
    try:
        build(partial)
        make_shared(partial)
        # Another process may have renamed its folder first; that folder has the same content.
        if not folder.is_dir():
            partial.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: {error.strerror or error}. Free disk space."
            ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def isolated_link(path: Path) -> Iterator[Path]:
    """Yield a link to a GGUF file in a temporary folder without other files.

    If there is a tokenizer.json, an adapter or a config next to a GGUF file, transformers would
    read these files instead of the GGUF file. The cache key covers only the GGUF file. Raises
    OSError.
    """
    with tempfile.TemporaryDirectory(prefix="tileforge-gguf-") as folder:
        link = Path(folder) / f"model{path.suffix}"
        link.symlink_to(path.resolve())
        yield link


def _default_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "tileforge-gguf"
