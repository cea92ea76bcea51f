"""Checkpoints: whole or absent, verified by their manifest, loadable by transformers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from payload.errors import CheckpointError, TrainingError
from payload.train.model import GPT
from payload.train.tensor_file import write_tensors
from payload.train.weights import WEIGHTS_FILE, save_hf

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"
TRAINER_FILE = "trainer.json"
OPTIMIZER_FILE = "optimizer.safetensors"

_FOLDER = re.compile(r"step_(\d{8,})")
_PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """trainer.json: where training stands, besides weights and optimizer."""

    step: int
    """Updates done."""
    next_sample: int
    """Global index of the first sequence not trained on: the whole data position."""
    tokens: int
    seed: int
    """Dropout masks are drawn from (seed, sample index); there is no generator state to keep."""
    dtype: Literal["bf16", "fp32"]
    """What the run computes in; under `auto`, a resume keeps it."""
    train_sha256: str
    """Hash of the train.bin that the data position refers to."""
    wall_s: float = 0.0
    """Time spent training so far, over all attempts."""
    world_size: int
    tokenizer: dict[str, str] = field(default_factory=dict)
    config_toml: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def save_checkpoint(
    folder: Path,
    *,
    model: GPT,
    optimizer: Mapping[str, Tensor],
    state: TrainerState,
    progressed: Callable[[], None] = lambda: None,
    tensors_read: Callable[[], None] = lambda: None,
) -> None:
    """Write the checkpoint `folder`: beside, flushed to disk, then renamed.

    `progressed` is called after each part of the work, `tensors_read` as soon as model and
    optimizer may change again. Raises TrainingError when the disk refuses; older checkpoints are
    untouched.
    """
    partial = folder.with_name(folder.name + _PARTIAL_SUFFIX)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        sha256 = {WEIGHTS_FILE: save_hf(model, partial, progressed=progressed)}
        sha256[OPTIMIZER_FILE] = write_tensors(
            partial / OPTIMIZER_FILE, optimizer, progressed=progressed
        )
        tensors_read()
        (partial / TRAINER_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n", "utf-8")
        _write_manifest(partial, sha256, progressed)
        _put_in_place(partial, folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainingError(
            f"checkpoint {folder}: cannot be written ({error}). Free disk space; training can be "
            "resumed from the checkpoint before it."
        ) from None


def load_trainer_state(folder: Path) -> TrainerState:
    """Read trainer.json of a checkpoint. Raises CheckpointError."""
    path = folder / TRAINER_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("schema_version") != SCHEMA_VERSION:
            raise CheckpointError(
                f"{path}: schema_version is {raw.get('schema_version')!r}, this release reads "
                f"{SCHEMA_VERSION}."
            )
        return TrainerState(**raw)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); use another checkpoint."
        ) from None


def load_optimizer_tensors(folder: Path) -> dict[str, Tensor]:
    """The optimizer's state of a checkpoint. Raises CheckpointError."""
    try:
        return load_file(folder / OPTIMIZER_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / OPTIMIZER_FILE}: cannot be read ({error}).") from None


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest folder whose manifest holds, or None; damaged ones are passed over, and named."""
    for folder in reversed(checkpoint_folders(checkpoints)):
        problems = manifest_problems(folder)
        if not problems:
            return folder
        log.warning(f"checkpoint {folder} is passed over: {problems[0]}")
    return None


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """Folders named as checkpoints, oldest first, whatever they hold."""
    if not checkpoints.is_dir():
        return []
    named = [path for path in checkpoints.iterdir() if _FOLDER.fullmatch(path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))


def manifest_problems(folder: Path) -> list[str]:
    """What differs from the manifest, one sentence each; empty for a sound checkpoint."""
    try:
        files = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))["files"]
        wanted = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST_FILE}: cannot be read ({error})."]
    found = (
        _file_problem(folder / name, size_bytes=size, sha256=sha256)
        for name, (size, sha256) in wanted.items()
    )
    return [problem for problem in found if problem is not None]


def remove_old_checkpoints(checkpoints: Path, *, keep: int, newest: Path) -> None:
    """Remove all but the `keep` up to `newest`, and what an interrupted write left.

    What lies beyond `newest`, the one just written, was damaged or given up: training has been
    resumed from before it.
    """
    folders = checkpoint_folders(checkpoints)
    kept = folders[: folders.index(newest) + 1][-keep:]
    for folder in set(folders) - set(kept):
        # Renamed first, so that a half-removed folder is never taken for a checkpoint.
        doomed = folder.with_name(folder.name + _PARTIAL_SUFFIX)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    remove_partial_checkpoints(checkpoints)


def remove_partial_checkpoints(checkpoints: Path) -> None:
    """Remove what an interrupted write left; none may be under way."""
    for partial in checkpoints.glob(f"step_*{_PARTIAL_SUFFIX}"):
        shutil.rmtree(partial, ignore_errors=True)


def _file_problem(path: Path, *, size_bytes: int, sha256: str) -> str | None:
    try:
        if not path.is_file():
            return f"{path.name}: missing."
        if path.stat().st_size != size_bytes:
            return f"{path.name}: {path.stat().st_size} bytes, the manifest says {size_bytes}."
        if _sha256(path) != sha256:
            return f"{path.name}: its sha256 is not the manifest's."
    except OSError as error:
        return f"{path.name}: cannot be read ({error.strerror})."
    return None


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename the whole checkpoint; one of the same name goes only when this one is there."""
    replaced = folder.with_name(f"{folder.name}.replaced{_PARTIAL_SUFFIX}")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    partial.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_manifest(
    folder: Path, sha256: Mapping[str, str], progressed: Callable[[], None]
) -> None:
    """`sha256` has the hashes that are known already, by name."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.iterdir()):
        known = sha256.get(path.name)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": known or _sha256(path)}
        _flush(path)
        progressed()
    manifest = folder / MANIFEST_FILE
    manifest.write_text(
        json.dumps({"schema_version": SCHEMA_VERSION, "files": files}, indent=2) + "\n", "utf-8"
    )
    _flush(manifest)
    _flush(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
