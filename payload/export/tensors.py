"""The weights of a folder in the Hugging Face layout, read one at a time and rounded."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from payload.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

# Buffers that old releases of transformers saved.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class WeightFiles:
    """Reads a model's tensors by name, each when it is requested."""

    def __init__(self, folder: Path) -> None:
        """Read the files' headers. Raises CheckpointError for what training refuses to load."""
        from payload.train.lazy_tensors import LazyTensors

        self._folder = folder
        self._tensors = LazyTensors(folder, fix="Use another checkpoint.")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's size, without reading it."""
        names = (name for name in self._tensors if not name.endswith(_BUFFERS))
        return {name: self._tensors.shape(name) for name in names}

    def read(self, name: str) -> Tensor:
        """Return one tensor as it is stored. Raises CheckpointError where it is not finite."""
        value = self._tensors[name]
        if not bool(value.isfinite().all()):
            raise CheckpointError(
                f"{self._folder}: {name} has NaN or infinity: training diverged before these "
                "weights were saved. Use another checkpoint."
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
    """Give a hidden name beside `path` to write to, and rename it when the block ends well.

    Raises CheckpointError when there is something at `path`, or the disk refuses.
    """
    import os
    import shutil

    from payload.results import fsync_folder

    if path.exists() or path.is_symlink():
        raise CheckpointError(f"--out {path}: exists. Name another one, or remove it.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def _fix(error: OSError) -> str:
    """Return what helps against an error of writing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free disk space, or name another place."
    return "Name a place that you may write to."
