"""Read the manifest of a checkpoint on a node or in a store, and download the checkpoint."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from payload.core.errors import CheckpointError
from payload.core.file_hash import sha256_of
from payload.core.files import fsync_folder
from payload.core.printable_text import shown
from payload.formats.checkpoint_listing import (
    MANIFEST_FILE,
    TRAINER_FILE,
    Manifest,
    ManifestEntry,
    load_manifest,
)

_DATA_FILE = re.compile(r"\w[\w.-]{0,120}\.(?:json|safetensors|txt|model|jinja)", re.ASCII)


def load_foreign_manifest(folder: Path, *, where: str) -> Manifest:
    """Read the manifest of a checkpoint on a node or in a store.

    `where` names the place in messages.

    Raises CheckpointError as `load_manifest` does, and if the manifest lists a file of a type that
    checkpoints do not have. Such a file could run code when it is loaded, or by its mere presence
    in a folder.
    """
    manifest = load_manifest(folder)
    odd = [name for name in manifest.files if not _DATA_FILE.fullmatch(name)]
    if odd or MANIFEST_FILE in manifest.files:
        found = shown(odd[0] if odd else MANIFEST_FILE)
        raise CheckpointError(
            f"{where}: lists {found}, which is not a checkpoint file. Use another checkpoint."
        )
    return manifest


def complete_copy(
    staging: Path,
    target: Path,
    manifest: Manifest,
    *,
    bring: Callable[[Path, ManifestEntry], None],
) -> Path:
    """Download the missing files of a checkpoint to `staging`, then rename `staging` to `target`.

    `bring` downloads one file, and raises an error if the file does not match the size and hash of
    its manifest entry. The file that identifies the run is downloaded first, because the other
    files can be large. Files of an earlier attempt are kept. An existing target is replaced once
    all files are complete. Returns `target`. Raises OSError, and the errors of `bring`.
    """
    for name in sorted(manifest.files, key=lambda name: name != TRAINER_FILE):
        path, entry = staging / name, manifest.files[name]
        if not (is_plain(path) and sha256_of(path) == entry.sha256):
            bring(path, entry)
    for each in staging.iterdir():
        if each.name not in {*manifest.files, MANIFEST_FILE}:
            discard_any(each)  # from an earlier attempt, when the checkpoint had other files
    if target.exists():
        shutil.rmtree(target)
    staging.replace(target)
    fsync_folder(target.parent)
    return target


def is_plain(path: Path) -> bool:
    """Return True if a path is a file and not a link."""
    return path.is_file() and not path.is_symlink()


def discard_any(path: Path) -> None:
    """Remove a file, a link or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
