"""CONTRACT: list a run's checkpoints, and validate them against their manifests."""

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
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import inside_folder
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
"""Weight files of a checkpoint with an adapter. Such a checkpoint has no `MODEL_FILES`."""
NEEDED_FILES = (OPTIMIZER_FILE, TRAINER_FILE)
"""Files that a resume needs in addition to the weights. A resume needs no tokenizer files."""
CHECKPOINTS_NAME = "checkpoints"
"""Name of a run's folder of checkpoints."""
BEST_NAME = "best"
"""Name of the link to the checkpoint with the lowest validation loss."""

PARTIAL_SUFFIX = ".partial"
"""Suffix of a checkpoint's folder while it is written or removed."""

FOLDER_NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,17})")
"""Name of a checkpoint's folder, with the step. Each step has only one name."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_NOT_ARITHMETIC = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
"""Keys of config.json that do not change results. The dtype is one of these keys, because a
run sets the dtype itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """Size and hash of one file of a checkpoint."""

    bytes: int = checked(low=0)
    sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of manifest.json: the size and hash of each other file of a checkpoint."""

    files: Mapping[str, ManifestEntry]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainerConfig:
    """The run's settings in trainer.json."""

    config_toml: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainerDtype:
    """The compute dtype in trainer.json."""

    dtype: Dtype


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint at `step`."""
    return f"step_{step:08d}"


def checkpoint_step(folder: PurePath) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(folder.name.partition("_")[2])


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """List the folders with a checkpoint's name, oldest first, regardless of their contents.

    Symlinks are left out, as they could lead to another run's checkpoints.
    """
    return [path for path in _named_folders(checkpoints) if not path.is_symlink()]


def _named_folders(checkpoints: Path) -> list[Path]:
    """List the paths with a checkpoint's name; an empty list if `checkpoints` is a link out of the
    run."""
    try:
        require_own(checkpoints)
    except CheckpointError:
        return []
    if not checkpoints.is_dir():
        return []
    named = [path for path in checkpoints.iterdir() if FOLDER_NAME.fullmatch(path.name)]
    return sorted(named, key=checkpoint_step)


def require_own(path: Path) -> None:
    """Raise CheckpointError if a checkpoint or a folder of checkpoints is a link out of its run.

    The link `best` must lead to a checkpoint in the same folder. Links at other paths are accepted,
    because the user gave these paths.
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
            raise OSError(
                errno.ELOOP, "a link that does not lead to a checkpoint in its folder", str(path)
            )
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. Use another checkpoint.") from None


def newest_valid(
    checkpoints: Path, *, passed_over: Callable[[Path, str], None] = lambda _folder, _problem: None
) -> Path | None:
    """Return the newest checkpoint with files that match its manifest, or None.

    All files of this checkpoint are read. `passed_over` is called with each damaged checkpoint and
    its problem.
    """
    for folder in reversed(_named_folders(checkpoints)):
        problems = ["it is a link."] if folder.is_symlink() else manifest_problems(folder)
        if not problems:
            return folder
        passed_over(folder, problems[0])
    return None


def best_checkpoints(checkpoints: Path, val_losses: Mapping[int, float]) -> list[Path]:
    """Return the checkpoints that may have the lowest validation loss; the first is the best.

    `val_losses` has the loss at each step. A checkpoint without a known loss is not a candidate.
    Exception: the target of the link `best` was evaluated, although the loss is no longer known.
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
    """Return the step with the lowest validation loss; of equal losses, the last step.

    `val_losses` has the loss at each step. Steps without a finite loss are left out. Returns None
    if no step remains.
    """
    rated = [step for step in steps if math.isfinite(val_losses.get(step, math.nan))]
    return min(rated, key=lambda step: (val_losses[step], -step), default=None)


def partial_checkpoints(checkpoints: Path) -> list[Path]:
    """List the folders of checkpoint writes that were interrupted or are in progress."""
    return list(checkpoints.glob(f"step_*{PARTIAL_SUFFIX}"))


def load_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises CheckpointError for a damaged or empty manifest."""
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
        raise CheckpointError(f"{path}: {odd[0][:60]!r} is not a file name. {fix}")
    return manifest


def manifest_problems(folder: Path) -> list[str]:
    """Return a sentence for each difference between the manifest and the checkpoint's files."""
    try:
        manifest = load_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    if (gap := listing_problem(manifest)) is not None:
        return [gap]
    found = (_file_problem(folder / name, entry) for name, entry in manifest.files.items())
    return [problem for problem in found if problem is not None]


def listing_problem(manifest: Manifest) -> str | None:
    """Return a sentence on a file that a resume needs and the manifest lacks; None without a
    problem."""
    is_adapter = any(name in manifest.files for name in ADAPTER_FILES)
    needed = (*(ADAPTER_FILES if is_adapter else MODEL_FILES), *NEEDED_FILES)
    missing = next((name for name in needed if name not in manifest.files), None)
    return None if missing is None else f"{MANIFEST_FILE}: the manifest does not list {missing}."


def checkpoint_config(folder: Path) -> str | None:
    """Return the run.toml that a checkpoint was trained with, or None if it is not recorded."""
    path = folder / TRAINER_FILE
    try:
        raw = parse_json(read_bytes(path), where=str(path))
        return build(_TrainerConfig, raw, where=str(path)).config_toml or None
    except (OSError, ConfigError):
        return None


def checkpoint_dtype(folder: Path) -> Dtype | None:
    """Return the dtype that a checkpoint was trained in, or None if it is not recorded."""
    path = folder / TRAINER_FILE
    try:
        raw = parse_json(read_bytes(path), where=str(path))
        return build(_TrainerDtype, raw, where=str(path)).dtype
    except (OSError, ConfigError):
        return None


def weights_sha256(folder: Path) -> str:
    """Return the hash of all weight files in a model's folder.

    An adapter records this hash to identify its base. Raises CheckpointError for a damaged index,
    for files that cannot be read and for links that lead out of the folder.
    """
    digest = hashlib.sha256()
    for name in weight_files(folder):
        try:
            digest.update(sha256_of(own_file(folder, name)).encode())
        except OSError as error:
            raise CheckpointError(f"{folder / name}: {error.strerror}. Restore the file.") from None
    return digest.hexdigest()


def config_sha256(folder: Path) -> str:
    """Return the hash of the keys of config.json that affect results.

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
            return f"{path.name}: the file has {size} bytes, but the manifest lists {entry.bytes}."
        if sha256_of(path) != entry.sha256:
            return f"{path.name}: its SHA-256 differs from the one in the manifest."
    except OSError as error:
        return f"{path.name}: cannot be read ({error.strerror})."
    return None
