"""Reads the headers of a model's safetensors files, without the package safetensors.

A folder has one file, or shards and an index that maps tensors to shards. The folder may be
untrusted, so every name, size and offset is checked against the files before use. Format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.core.regular_files import open_regular
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.formats.hf_folder import INDEX_FILE, WEIGHTS_FILE, has_shards, own_file, weight_map

PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.bin")
"""Weight files in torch's own format, which can run code."""

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Supported dtypes of a model's weights. A weight in a smaller dtype is quantised."""

_MAX_HEADER_BYTES = 100 * 10**6  # The format's own limit.
_MAX_TENSORS = 10**6
_LFS_POINTER = b"version https://git-lfs"
_FIX = "Download the model again, or use another model."


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """Location and type of one tensor."""

    path: Path
    dtype: str
    """The dtype by its name in the file: F32, BF16, ..."""
    shape: tuple[int, ...]
    start: int
    """Offset of the tensor's first byte in the file."""

    def num_elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def is_weight(self) -> bool:
        """Return whether the tensor's dtype is supported for weights."""
        return self.dtype in FLOAT_DTYPES

    def num_bytes(self) -> int:
        """Return the tensor's size in the file, in bytes."""
        return self.num_elements() * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A tensor's entry in a file's header."""

    dtype: str = checked(max_chars=20)
    shape: tuple[int, ...] = checked(low=0, high=2**48, max_items=16)
    data_offsets: tuple[int, int] = checked(low=0, high=2**62)


def tensor_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return every tensor of the model in `folder`, by name.

    Raises CheckpointError for missing, truncated or damaged files, for shards and an index that
    contradict each other, and for weights in a different format.
    """
    if not has_shards(folder):
        return file_headers(_weights_file(folder, WEIGHTS_FILE))
    index = folder / INDEX_FILE
    names = weight_map(folder)
    shards = {
        name: file_headers(_weights_file(folder, name, index=index))
        for name in sorted(set(names.values()))
    }
    for tensor, name in names.items():
        if tensor not in shards[name]:
            raise CheckpointError(f"{index}: {name} lacks tensor {shown(tensor)}. {_FIX}")
    # transformers loads every tensor of each shard, listed in the index or not.
    found: dict[str, TensorHeader] = {}
    for name, tensors in shards.items():
        for tensor, header in tensors.items():
            first = found.setdefault(tensor, header)
            if first is not header:
                raise CheckpointError(
                    f"{index}: {first.path.name} and {name} both have {shown(tensor)}. {_FIX}"
                )
    return found


def _weights_file(folder: Path, name: str, *, index: Path | None = None) -> Path:
    """Return the file's path. Raises CheckpointError if the file is missing or is a link out of the
    folder."""
    path = own_file(folder, name)
    if not path.is_file():
        if index is not None:
            raise CheckpointError(f"{index}: lists {name}, which is missing. {_FIX}")
        raise CheckpointError(f"{folder}: {_why_no_weights(folder)}")
    return path


def _why_no_weights(folder: Path) -> str:
    """Return why a folder has no weights that can be loaded, and the fix."""
    pickles = [name for name in PICKLE_FILES if (folder / name).exists()]
    pickles += sorted(path.name for path in folder.glob("pytorch_model-*.bin"))[:1]
    if pickles:
        return (
            f"its weights are a pickle ({pickles[0]}), which can run code when it is loaded. "
            "If you trust the file, load it once in transformers and call save_pretrained, which "
            "writes safetensors."
        )
    if list(folder.glob("model-*-of-*.safetensors")):
        return f"the folder has shards but no {INDEX_FILE}. {_FIX}"
    return f"the folder has no weights ({WEIGHTS_FILE}, or shards and {INDEX_FILE}). {_FIX}"


def file_headers(path: Path, *, fix: str = _FIX) -> dict[str, TensorHeader]:
    """Return the tensors of one file, after checking that each is inside the file.

    Raises CheckpointError, ending with `fix`, if the file is missing, truncated or damaged.
    """
    raw, start, size = _raw_header(path, fix)
    if len(raw) > _MAX_TENSORS:
        raise CheckpointError(
            f"{path}: its header lists {len(raw):,} tensors, more than the limit of "
            f"{_MAX_TENSORS:,}. {fix}"
        )
    found: dict[str, TensorHeader] = {}
    end_of_data = 0
    for name, value in raw.items():
        if name == "__metadata__":
            continue
        where = f"{path}: {shown(name)}"
        entry = build(_Entry, value, where=where, fix=fix, error=CheckpointError)
        if entry.dtype not in DTYPE_BYTES:
            raise CheckpointError(f"{where}: unknown dtype {shown(entry.dtype)}. {fix}")
        begin, end = entry.data_offsets
        header = TensorHeader(path=path, dtype=entry.dtype, shape=entry.shape, start=start + begin)
        if end - begin != header.num_bytes():
            raise CheckpointError(
                f"{where}: {entry.dtype} of shape {list(entry.shape)} needs {header.num_bytes():,} "
                f"bytes, but the header reserves {end - begin:,}: the file is damaged. {fix}"
            )
        end_of_data = max(end_of_data, end)
        found[name] = header
    if start + end_of_data != size:
        raise CheckpointError(
            f"{path}: {size:,} bytes, but its header requires {start + end_of_data:,}: the file is "
            f"truncated or damaged. {fix}"
        )
    return found


def _raw_header(path: Path, fix: str) -> tuple[dict[str, Any], int, int]:
    """Return the header's entries, the offset of the data, and the file's size."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            file.seek(0)
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise CheckpointError(
                    f"{path}: a Git LFS pointer, not the weights. Run `git lfs pull` in its "
                    "folder, or download the model again."
                )
            file.seek(8)
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: {size:,} bytes: the file is truncated, or not a safetensors file. "
                    f"{fix}"
                )
            content = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. {fix}") from None
    raw = parse_json(content, where=f"{path}: header", fix=fix, error=CheckpointError)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object. {fix}")
    return raw, 8 + length, size
