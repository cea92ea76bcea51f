"""CONTRACT: lists a run's checkpoints and tells which are valid. Standard library only."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from payload.core.dtype import Dtype
from payload.core.errors import CheckpointError, ConfigError
from payload.core.file_hash import sha256_of
from payload.core.links import inside_folder
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import SHA256
from payload.core.validation.records import build, check_schema
from payload.formats.hf_folder import own_file, read_config, weight_files

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"
TRAINER_FILE = "trainer.json"
OPTIMIZER_FILE = "optimizer.safetensors"
MODEL_FILES = ("model.safetensors", "config.json")
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
"""Files of an adapter's checkpoint, in place of `MODEL_FILES`."""
NEEDED_FILES = (OPTIMIZER_FILE, TRAINER_FILE)
"""The other files that a resume needs; the tokenizer's are for other programs."""
CHECKPOINTS_NAME = "checkpoints"
"""A run's folder of checkpoints."""
BEST_NAME = "best"
"""A link beside the checkpoints, to the one with the lowest validation loss."""

PARTIAL_SUFFIX = ".partial"
"""Suffix of a checkpoint's folder while it is written or removed."""

FOLDER_NAME = re.compile(r"step_([0-9]{8,18})")
"""A checkpoint's folder, by the number of its step."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_NOT_ARITHMETIC = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
"""Keys of config.json that change no result: weights are computed with in the run's own dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One file of a checkpoint, as it was written."""

    bytes: int = checked(low=0)
    sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """manifest.json: every other file of a checkpoint."""

    files: Mapping[str, ManifestEntry]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainerConfig:
    """The part of trainer.json that says what was trained."""

    config_toml: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainerDtype:
    """The part of trainer.json that says in what it was trained."""

    dtype: Dtype


def folder_name(step: int) -> str:
    """Return the name of the folder of the checkpoint of this step."""
    return f"step_{step:08d}"


def checkpoint_step(folder: PurePath) -> int:
    """Return the number of steps that a checkpoint's folder has behind it."""
    return int(folder.name.partition("_")[2])


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """List the folders named as checkpoints, oldest first, whatever they hold.

    Symlinks are left out: whoever made the run's folder could lead to another run's checkpoints.
    """
    return [path for path in _named_folders(checkpoints) if not path.is_symlink()]


def _named_folders(checkpoints: Path) -> list[Path]:
    """List what is named as a checkpoint; nothing where the folder leads out of the run's."""
    try:
        require_own(checkpoints)
    except CheckpointError:
        return []
    if not checkpoints.is_dir():
        return []
    named = [path for path in checkpoints.iterdir() if FOLDER_NAME.fullmatch(path.name)]
    return sorted(named, key=checkpoint_step)


def require_own(path: Path) -> None:
    """Raise CheckpointError where a run's checkpoint, or folder of them, is a link out of the run.

    `best` leads to a checkpoint beside it. A link elsewhere is one that a person has named.
    """
    if path.name == CHECKPOINTS_NAME:
        home = path.parent
    elif path.parent.name == CHECKPOINTS_NAME:
        home = path.parent.parent
    else:
        return
    try:
        inside_folder(path, home=home)
        if path.is_symlink() and path.resolve().parent != path.parent.resolve():
            raise OSError(errno.ELOOP, "a link that leads to no checkpoint beside it", str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. Name another checkpoint.") from None


def newest_sound(
    checkpoints: Path, *, passed_over: Callable[[Path, str], None] = lambda _folder, _problem: None
) -> Path | None:
    """Return the newest folder whose files are those of its manifest, or None.

    Reads every file of it. `passed_over` is told of each damaged one and what is wrong with it.
    """
    for folder in reversed(_named_folders(checkpoints)):
        problems = ["it is a link."] if folder.is_symlink() else manifest_problems(folder)
        if not problems:
            return folder
        passed_over(folder, problems[0])
    return None


def best_checkpoints(checkpoints: Path, val_losses: Mapping[int, float]) -> list[Path]:
    """Return the folders that may have the lowest validation loss; the first is named the best.

    `val_losses` is by step. A checkpoint whose step was not evaluated is no candidate, but for the
    one that `best` leads to: its loss was lost, so nobody can tell whether another's is lower.
    """
    folders = {checkpoint_step(path): path for path in checkpoint_folders(checkpoints)}
    lowest = best_step(folders, val_losses)
    linked = None
    with suppress(OSError):
        linked = checkpoints / (checkpoints / BEST_NAME).readlink().name
    unrated = [
        path
        for step, path in folders.items()
        if path == linked and best_step([step], val_losses) is None
    ]
    return unrated if lowest is None else [*unrated, folders[lowest]]


def best_step(steps: Iterable[int], val_losses: Mapping[int, float]) -> int | None:
    """Return the step with the lowest validation loss, of equals the last.

    `val_losses` is by step. A step without a finite loss is no candidate; None where all are such.
    """
    rated = [step for step in steps if math.isfinite(val_losses.get(step, math.nan))]
    return min(rated, key=lambda step: (val_losses[step], -step), default=None)


def partial_checkpoints(checkpoints: Path) -> list[Path]:
    """List what interrupted writes left, or the one under way."""
    return list(checkpoints.glob(f"step_*{PARTIAL_SUFFIX}"))


def load_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises CheckpointError, also when it lists no file."""
    path, fix = folder / MANIFEST_FILE, "Use another checkpoint."
    try:
        raw = parse_json(read_bytes(path), where=str(path), error=CheckpointError, fix=fix)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). {fix}") from None
    check_schema(raw, SCHEMA_VERSION, where=str(path), error=CheckpointError, fix=fix)
    manifest = build(Manifest, raw, where=str(path), error=CheckpointError, fix=fix)
    if not manifest.files:
        raise CheckpointError(f"{path}: lists no file. {fix}")
    odd = [name for name in manifest.files if not _FILE_NAME.fullmatch(name)]
    if odd:
        raise CheckpointError(f"{path}: {odd[0][:60]!r} is no file name. {fix}")
    return manifest


def manifest_problems(folder: Path) -> list[str]:
    """List what differs from the manifest, one sentence each; empty for a sound checkpoint."""
    try:
        manifest = load_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    if (gap := listing_problem(manifest)) is not None:
        return [gap]
    found = (_file_problem(folder / name, entry) for name, entry in manifest.files.items())
    return [problem for problem in found if problem is not None]


def listing_problem(manifest: Manifest) -> str | None:
    """Return a sentence where a manifest lacks a file that a resume needs, else None."""
    is_adapter = any(name in manifest.files for name in ADAPTER_FILES)
    needed = (*(ADAPTER_FILES if is_adapter else MODEL_FILES), *NEEDED_FILES)
    missing = next((name for name in needed if name not in manifest.files), None)
    return None if missing is None else f"{MANIFEST_FILE}: does not list {missing}."


def checkpoint_config(folder: Path) -> str | None:
    """Return the run.toml that a checkpoint was trained by, or None where it does not say."""
    path = folder / TRAINER_FILE
    try:
        raw = parse_json(read_bytes(path), where=str(path))
        return build(_TrainerConfig, raw, where=str(path)).config_toml or None
    except (OSError, ConfigError):
        return None


def checkpoint_dtype(folder: Path) -> Dtype | None:
    """Return the dtype that a checkpoint was trained in, or None where it does not say."""
    path = folder / TRAINER_FILE
    try:
        raw = parse_json(read_bytes(path), where=str(path))
        return build(_TrainerDtype, raw, where=str(path)).dtype
    except (OSError, ConfigError):
        return None


def weights_sha256(folder: Path) -> str:
    """Return the hash over a model folder's files with weights: what an adapter's base is known by.

    Raises CheckpointError for a damaged index, for files that cannot be read and for links that
    lead out of the folder.
    """
    digest = hashlib.sha256()
    for name in weight_files(folder):
        try:
            digest.update(sha256_of(own_file(folder, name)).encode())
        except OSError as error:
            raise CheckpointError(
                f"{folder / name}: {error.strerror}. Put the weights back in that place."
            ) from None
    return digest.hexdigest()


def config_sha256(folder: Path) -> str:
    """Return the hash of what a model folder's config.json says of the arithmetic.

    Raises CheckpointError.
    """
    config = read_config(folder)
    kept = {key: config[key] for key in config.keys() - _NOT_ARITHMETIC}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _file_problem(path: Path, entry: ManifestEntry) -> str | None:
    try:
        if not path.is_file():
            return f"{path.name}: missing."
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{path.name}: {size} bytes, the manifest says {entry.bytes}."
        if sha256_of(path) != entry.sha256:
            return f"{path.name}: its sha256 is not the manifest's."
    except OSError as error:
        return f"{path.name}: cannot be read ({error.strerror})."
    return None
