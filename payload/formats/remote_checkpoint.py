"""A checkpoint that a node or a store has: its manifest, and its way to a folder here."""

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
    """Read the manifest of a checkpoint that a node or a store has, `where` to the user.

    Raises CheckpointError as `load_manifest` does, and for files that checkpoints do not consist
    of: loading one of those may run it, and Python runs some that only lie in a folder.
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
    """Bring what `staging` lacks of a checkpoint, rename it to `target`, and return that.

    `bring` writes one file so that it has its entry's size and hash, or raises. The first is the
    one that says of which run the checkpoint is: what follows may be large. A file that an earlier
    attempt has brought stays. What lies in the target's place goes once all files are there.
    Raises OSError, and what `bring` raises.
    """
    for name in sorted(manifest.files, key=lambda name: name != TRAINER_FILE):
        path, entry = staging / name, manifest.files[name]
        if not (is_plain(path) and sha256_of(path) == entry.sha256):
            bring(path, entry)
    for each in staging.iterdir():
        if each.name not in {*manifest.files, MANIFEST_FILE}:
            discard_any(each)  # an earlier attempt's, of a checkpoint that was another one then
    if target.exists():
        shutil.rmtree(target)
    staging.replace(target)
    fsync_folder(target.parent)
    return target


def is_plain(path: Path) -> bool:
    """Say whether a path is a file and no link to one."""
    return path.is_file() and not path.is_symlink()


def discard_any(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
