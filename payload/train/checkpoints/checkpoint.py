"""Checkpoints: complete or absent, verified by their manifest, loadable by transformers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from payload.config.training_sections import Quantize
from payload.core.errors import CheckpointError, TrainingError
from payload.core.file_hash import sha256_of
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build, check_schema
from payload.formats.checkpoint_listing import (
    BEST_NAME,
    MANIFEST_FILE,
    OPTIMIZER_FILE,
    PARTIAL_SUFFIX,
    SCHEMA_VERSION,
    TRAINER_FILE,
    checkpoint_folders,
    newest_valid,
    partial_checkpoints,
)
from payload.formats.hf_folder import WEIGHTS_FILE
from payload.run_record.run_identity import PATTERN, WANTED
from payload.train.checkpoints.snapshot import Snapshot
from payload.train.models.base import CausalLM
from payload.train.models.hf_weights import save_hf_config, warn_skipped
from payload.train.models.lora import save_adapter_config
from payload.train.tensors.copied_parts import CopiedParts
from payload.train.tensors.lazy_tensors import LazyTensors
from payload.train.tensors.tensor_file import write_tensors
from payload.weights.adapter_files import ADAPTER_FILE

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """Identifies the frozen base weights of an adapter.

    The adapter's checkpoints lack these weights.
    """

    source: str
    """Folder or hub name of the base model."""
    revision: str | None = None
    """Commit on the hub."""
    sha256: str = ""
    """Hash over the files with the weights."""
    config_sha256: str | None = None
    """Hash over the settings in config.json that affect the computation; None in older records."""
    quantize: Quantize = "none"
    """Quantisation of the base's linears while the adapter was trained."""

    def has_same_config(self, other: BaseModel) -> bool:
        """Return False if both records have a hash of config.json and the hashes differ."""
        return len({self.config_sha256, other.config_sha256} - {None}) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """trainer.json: the state of training, without weights and optimizer state."""

    step: int = checked(low=0)
    """Number of optimizer updates so far."""
    next_sample: int = checked(low=0)
    """Index, over the whole run, of the first sequence that was not trained on yet. No other
    position in the data is saved."""
    tokens: int = checked(low=0)
    seed: int
    """Seed of the run. Dropout masks depend only on the seed and the index of the sample, so no
    generator state is saved."""
    dtype: Literal["bf16", "fp32"]
    """The compute dtype; a resume with `precision.dtype = "auto"` keeps this dtype."""
    train_sha256: str
    """Hash of the train.bin that the data position refers to."""
    data_sha256: dict[str, str] = field(default_factory=dict)
    """Hashes of the data folder's files (`DataMeta.hashes`); empty in checkpoints of older
    versions."""
    wall_s: float = checked(0.0, low=0)
    """Time spent training so far, over all attempts."""
    world_size: int = checked(low=1)
    tokenizer: dict[str, str] = field(default_factory=dict)
    base: BaseModel | None = None
    """The base that an adapter was trained on; None without an adapter."""
    identity: str | None = checked(None, pattern=PATTERN, wanted=WANTED)
    """Identity of the run. It distinguishes runs of the same name. None in older records."""
    router_loss: bool | None = None
    """True if training adds the load-balancing loss of a mixture of experts; None in older
    records."""
    config_toml: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def save_checkpoint(
    folder: Path,
    *,
    model: CausalLM,
    snapshot: Snapshot,
    state: TrainerState,
    tokenizer: Mapping[str, bytes],
    copied: CopiedParts | None = None,
    progressed: Callable[[], None] = lambda: None,
    tensors_read: Callable[[], None] = lambda: None,
) -> None:
    """Write the checkpoint to a temporary folder, sync it to disk and rename it to `folder`.

    `tokenizer` maps file names to contents. `copied` are the untrained parts of a multimodal model;
    later checkpoints copy these parts from `folder`. `progressed` is called after each part of the
    work. `tensors_read` is called when all tensors are read, so that model and optimizer may
    change. Raises TrainingError when a write fails; older checkpoints are untouched.
    """
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        # No parents=True: if the run's folder was removed, this must not create it again.
        partial.parent.mkdir(exist_ok=True)
        partial.mkdir()
        weights_file = _write_model_config(partial, model, state.base)
        sha256 = _write_snapshot(
            partial, snapshot, weights_file=weights_file, progressed=progressed, copied=copied
        )
        tensors_read()
        processor = {} if copied is None else copied.files
        for name, content in {**processor, **tokenizer}.items():
            (partial / name).write_bytes(content)
        (partial / TRAINER_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n", "utf-8")
        _write_manifest(partial, sha256, progressed)
        _put_in_place(partial, folder)
        if copied is not None:
            copied.move_to(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainingError(
            f"checkpoint {folder}: cannot be written ({error}). Free disk space, then resume from "
            "the previous checkpoint."
        ) from None


def load_trainer_state(folder: Path) -> TrainerState:
    """Read trainer.json of a checkpoint. Raises CheckpointError."""
    path, fix = folder / TRAINER_FILE, "Use another checkpoint."
    try:
        raw = parse_json(read_bytes(path), where=str(path), fix=fix, error=CheckpointError)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). {fix}") from None
    check_schema(raw, SCHEMA_VERSION, where=str(path), fix=fix, error=CheckpointError)
    return build(TrainerState, raw, where=str(path), fix=fix, error=CheckpointError)


def optimizer_tensors(folder: Path) -> LazyTensors:
    """Open the optimizer state of a checkpoint without reading its tensors.

    Raises CheckpointError.
    """
    return LazyTensors(folder / OPTIMIZER_FILE, fix="Use another checkpoint.")


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """Return the newest valid checkpoint, or None; log and skip damaged checkpoints."""
    return newest_valid(checkpoints, passed_over=warn_skipped)


def remove_old_checkpoints(
    checkpoints: Path, *, keep: int, newest: Path, best: Sequence[Path] = ()
) -> list[Path]:
    """Remove partial checkpoints and old checkpoints; return the old checkpoints.

    Keep `best` and the last `keep` checkpoints up to `newest`, the checkpoint that was just
    written.

    Checkpoints of later steps are removed, because such checkpoints are damaged, or training was
    resumed from an earlier checkpoint.
    """
    folders = checkpoint_folders(checkpoints)
    going_on = folders[: folders.index(newest) + 1]
    kept = {*going_on[-keep:], *(set(best) & set(going_on))}
    removed = [folder for folder in folders if folder not in kept]
    for folder in removed:
        # Renamed first, so that a half-removed folder is never mistaken for a checkpoint.
        doomed = folder.with_name(folder.name + PARTIAL_SUFFIX)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    remove_partial_checkpoints(checkpoints)
    return removed


def point_to_best(checkpoints: Path, best: Path) -> None:
    """Make `checkpoints/best` a link to the folder `best`, if the file system supports links."""
    link = checkpoints / BEST_NAME
    fresh = checkpoints / f".{BEST_NAME}{PARTIAL_SUFFIX}"
    with contextlib.suppress(OSError):
        if link.is_symlink() and link.readlink() == Path(best.name):
            return
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(best.name)
        fresh.replace(link)


def remove_partial_checkpoints(checkpoints: Path) -> None:
    """Remove the remains of interrupted writes; call only when no write is running."""
    for partial in partial_checkpoints(checkpoints):
        shutil.rmtree(partial, ignore_errors=True)


def _write_model_config(folder: Path, model: CausalLM, base: BaseModel | None) -> str:
    """Write the config of the model or its adapter; return the file name of the weights."""
    if model.adapter is not None and base is not None:
        save_adapter_config(model, folder, base=(base.source, base.revision))
        return ADAPTER_FILE
    save_hf_config(model, folder)
    return WEIGHTS_FILE


def _write_snapshot(
    folder: Path,
    snapshot: Snapshot,
    *,
    weights_file: str,
    progressed: Callable[[], None],
    copied: CopiedParts | None,
) -> dict[str, str]:
    """Write the tensors; return the sha256 of each file by name."""
    return {
        name: write_tensors(
            folder / name,
            tensors,
            metadata=metadata,
            progressed=progressed,
            whole=snapshot.whole,
            copied=copied if name == WEIGHTS_FILE else None,
        )
        for name, tensors, metadata in (
            (weights_file, snapshot.weights, {"format": "pt"}),
            (OPTIMIZER_FILE, snapshot.optimizer, None),
        )
    }


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename the complete checkpoint to `folder`; only then remove an older checkpoint of this
    name."""
    replaced = folder.with_name(f"{folder.name}.replaced{PARTIAL_SUFFIX}")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    partial.rename(folder)
    _flush(folder.parent)
    # For a first checkpoint, the parent folder is new as well.
    _flush(folder.parent.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_manifest(
    folder: Path, sha256: Mapping[str, str], progressed: Callable[[], None]
) -> None:
    """Write the manifest; `sha256` has the hashes that are already computed, by file name."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.iterdir()):
        known = sha256.get(path.name)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": known or sha256_of(path)}
        _flush(path)
        progressed()
    manifest = folder / MANIFEST_FILE
    manifest.write_text(
        json.dumps({"schema_version": SCHEMA_VERSION, "files": files}, indent=2) + "\n", "utf-8"
    )
    _flush(manifest)
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
