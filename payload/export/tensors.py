"""The weights of a folder in the Hugging Face layout, read one at a time and rounded."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from payload.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from payload.train.tensors.lazy_tensors import PlannedTensors


class WeightFiles:
    """Reads a model's tensors by name, each when it is requested."""

    def __init__(
        self, folder: Path, tensors: PlannedTensors, *, labels: Mapping[str, Any] | None = None
    ) -> None:
        """Take the files of a model that were compared with it; `folder` is for messages."""
        self._folder = folder
        self._tensors = tensors
        self.labels = labels or {}
        """A merged classifier's part of config.json, which its base's does not have."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the size of every tensor that the model has, without reading it."""
        return {name: self._tensors.shape(name) for name in self._tensors.targets}

    def read(self, name: str) -> Tensor:
        """Return one tensor as it is stored. Raises CheckpointError where it is not finite."""
        return _finite(self._tensors[name], name, folder=self._folder)


class HeldWeights(WeightFiles):
    """Weights of a model that is in memory, read as those of a folder are."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        *,
        labels: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the tensors by transformers' names; `folder` is for messages."""
        self._folder = folder
        self._held = tensors
        self.labels = labels or {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's size."""
        return {name: tuple(value.shape) for name, value in self._held.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor in fp32. Raises CheckpointError where it is not finite."""
        return _finite(self._held[name], name, folder=self._folder)


def weights_of(folder: Path) -> WeightFiles:
    """Return the weights of the model in a folder, compared with its config.json.

    Raises CheckpointError for what training refuses.
    """
    from payload.train.models.loading import plan

    model, tensors = plan(folder)
    if tensors.targets:
        return WeightFiles(folder, tensors)
    return HeldWeights(folder, model.hf_tensors())


def _finite(value: Tensor, name: str, *, folder: Path) -> Tensor:
    if not bool(value.isfinite().all()):
        raise CheckpointError(
            f"{folder}: {name} has NaN or infinity: training diverged before these weights were "
            "saved. Use another checkpoint."
        )
    return value


def rounded(name: str, value: Tensor, dtype: Literal["bf16", "f16", "fp32"]) -> Tensor:
    """Return the tensor in `dtype`. Raises CheckpointError for a number that f16 has not."""
    import torch

    if dtype == "fp32":
        return value.float()
    converted = value.to(torch.bfloat16 if dtype == "bf16" else torch.float16)
    if not bool(converted.isfinite().all()):
        raise CheckpointError(
            f"{name} has {float(value.abs().max()):.3g}, beyond {dtype}'s largest number. Use "
            "--dtype bf16."
        )
    return converted


@contextlib.contextmanager
def whole_or_absent(path: Path) -> Iterator[Path]:
    """Give a name in a new folder beside `path`, and rename it to `path` when the block ends well.

    Nobody else may write in the folder, nor guess its name: no link can wait in the file's place.
    Raises CheckpointError when there is something at `path`, or the disk refuses.
    """
    import os
    import shutil
    import tempfile

    from payload.core.files import fsync_folder

    if path.exists() or path.is_symlink():
        raise CheckpointError(f"--out {path}: exists. Name another one, or remove it.")
    holder = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        holder = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        partial = Path(holder, path.name)
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
        if holder is not None:
            shutil.rmtree(holder, ignore_errors=True)


def _fix(error: OSError) -> str:
    """Return what helps against an error of writing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free disk space, or name another place."
    return "Name a place that you may write to."
