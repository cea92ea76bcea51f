"""Reads the weights of a folder in the Hugging Face layout, one tensor at a time."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from payload.core.errors import CheckpointError
from payload.models.spec import EXPERT_BIASES

if TYPE_CHECKING:
    from torch import Tensor

    from payload.train.tensors.lazy_tensors import PlannedTensors


class WeightFiles:
    """Reads tensors of a model by name, on demand."""

    def __init__(
        self, folder: Path, tensors: PlannedTensors, *, labels: Mapping[str, Any] | None = None
    ) -> None:
        """Store the verified files of a model; `folder` appears in messages."""
        self._folder = folder
        self._tensors = tensors
        self.labels = labels or {}
        """Entries for config.json that a merged classifier needs and the base's config.json
        lacks."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor of the model, without reading it."""
        return {name: self._tensors.shape(name) for name in self._tensors.targets}

    def read(self, name: str) -> Tensor:
        """Return one tensor as it is stored. Raises CheckpointError for NaN or infinity."""
        return _require_finite(self._tensors[name], name, folder=self._folder)


class InMemoryWeights(WeightFiles):
    """Weights of a model in memory, with the interface of `WeightFiles`."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        *,
        labels: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the tensors, named as in transformers; `folder` appears in messages."""
        self._folder = folder
        self._held = tensors
        self.labels = labels or {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: tuple(value.shape) for name, value in self._held.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor in fp32. Raises CheckpointError for NaN or infinity."""
        return _require_finite(self._held[name], name, folder=self._folder)


def weights_of(folder: Path) -> WeightFiles:
    """Return the weights of the model in a folder, verified against its config.json.

    Raises CheckpointError for models that training rejects.
    """
    from payload.train.models.loading import plan

    model, tensors = plan(folder)
    if tensors.targets:
        return WeightFiles(folder, tensors)
    return InMemoryWeights(folder, model.hf_tensors())


def _require_finite(value: Tensor, name: str, *, folder: Path) -> Tensor:
    if not bool(value.isfinite().all()):
        raise CheckpointError(
            f"{folder}: {name} has NaN or infinity: training diverged before these weights were "
            "saved. Use another checkpoint."
        )
    return value


def rounded(name: str, value: Tensor, dtype: Literal["bf16", "f16", "fp32"]) -> Tensor:
    """Return the tensor in `dtype`. Raises CheckpointError for a number too large for f16.

    Integers, and biases that choose experts, keep their dtype. Rounded biases would choose
    different experts.
    """
    import torch

    if not value.is_floating_point() or name.endswith(EXPERT_BIASES):
        return value
    if dtype == "fp32":
        return value.float()
    converted = value.to(torch.bfloat16 if dtype == "bf16" else torch.float16)
    if not bool(converted.isfinite().all()):
        raise CheckpointError(
            f"{name} has a value of {float(value.abs().max()):.3g}, which is too large for "
            f"{dtype}. Use --dtype bf16."
        )
    return converted


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path. If the block succeeds, rename the temporary path to `path`.

    The temporary path is in a new folder next to `path`. This folder has a random name, and only
    this user can write to it, so another user cannot plant a link there. Raises CheckpointError if
    `path` exists, or if writing fails.
    """
    import os
    import shutil
    import tempfile

    from payload.core.files import fsync_folder

    if path.exists() or path.is_symlink():
        raise CheckpointError(f"--out {path}: already exists. Choose another path, or remove it.")
    temp_folder = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp_folder = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        partial = Path(temp_folder, path.name)
        yield partial
        for file in [partial, *(partial.iterdir() if partial.is_dir() else ())]:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        partial.rename(path)
        fsync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"--out {path}: cannot be written ({error.strerror or error}). {_fix(error)}"
        ) from None
    finally:
        if temp_folder is not None:
            shutil.rmtree(temp_folder, ignore_errors=True)


def _fix(error: OSError) -> str:
    """Return the fix for a write error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free disk space, or choose another path."
    return "Choose a writable path."
