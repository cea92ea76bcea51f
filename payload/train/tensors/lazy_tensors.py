"""Reads weights tensor by tensor, so that loading takes little more memory than the model."""

from __future__ import annotations

import copy
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from payload.core.errors import CheckpointError
from payload.core.regular_files import open_regular, read_bytes
from payload.formats.checkpoint_listing import MANIFEST_FILE
from payload.formats.quantized.stored_weight import StoredWeight
from payload.formats.quantized.weight_headers import weight_headers
from payload.formats.tensor_headers import TensorHeader, file_headers
from payload.models.multimodal_tensors import model_headers
from payload.train.ranks.world import World
from payload.train.tensors.dequantize.rows import open_rows

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}
_QUANTIZED_DTYPES = {
    **_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""The dtypes of the parts of a quantised weight."""
_TAIL_BYTES = 2**16
_CHUNK_BYTES = 4 * 2**20
"""Bytes per read when a tensor's dtype is converted."""


class Part(NamedTuple):
    """The part of a tensor that begins at `first` along dimension `dim`."""

    dim: int
    first: int


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of a folder's weights, or of a single file; each tensor is read on access.

    Quantised weights of a folder appear dequantised, in the dtype that config.json gives the model.
    Of a multimodal checkpoint, only the text model's tensors appear, with the text model's names.

    Raises CheckpointError for missing, damaged or unsupported files, on construction and when a
    tensor is read.
    """

    def __init__(self, path: Path, *, fix: str = "Download the model again.") -> None:
        """Read the headers of `path`; `fix` is the advice in error messages."""
        self._headers = model_headers(path) if path.is_dir() else file_headers(path, fix=fix)
        self._fix = fix
        # All reads use one buffer: glibc keeps some freed buffers, so the memory peak would vary.
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor in its own dtype."""
        header = self._headers[name]
        tensor = torch.empty(header.shape, dtype=_dtype(name, header))
        self.copy_to(name, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self._headers[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype in the file."""
        return _dtype(name, self._headers[name])

    def kind(self, name: str) -> str:
        """Return the file format's name of a tensor's dtype: F32, BF16, I8, ..."""
        return self._headers[name].dtype

    def without(self, name: str) -> Self:
        """Return the same tensors without `name`."""
        others = copy.copy(self)
        others._headers = {each: self._headers[each] for each in self._headers if each != name}
        return others

    def num_elements(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(header.num_elements() for header in self._headers.values())

    def copy_to(self, name: str, target: Tensor, *parts: Part) -> None:
        """Copy a tensor, or a part of it, into `target`. The target can have any dtype and strides.

        `parts` gives where the part begins, in one or more dimensions; `target` gives its size.
        """
        header = self._headers[name]
        dtype = _dtype(name, header, trained=target.is_floating_point())
        assert parts or header.shape == tuple(target.shape), "the caller compares shapes"
        if not target.numel():
            return
        first = sum(each.first for each in parts if each.dim == 0)
        others = [each for each in parts if each.dim]
        if isinstance(header, StoredWeight):
            self._copy_dequantized(name, header, target.detach(), first=first, parts=others)
            return
        rows = target.detach().unsqueeze(0) if target.dim() == 0 else target.detach()
        shape = header.shape or (1,)
        row_bytes = header.num_bytes() // shape[0]
        with self._opened(header, at_byte=first * row_bytes) as file:
            if not others and target.dtype == dtype and target.is_contiguous():
                _read(file, target.detach())
                return
            at_once = max(1, _CHUNK_BYTES // row_bytes)
            if self._buffer.numel() < at_once * row_bytes:
                self._buffer = torch.empty(at_once * row_bytes, dtype=torch.uint8)
            for start in range(0, rows.shape[0], at_once):
                some = rows[start : start + at_once]
                chunk = self._buffer[: len(some) * row_bytes].view(dtype)
                chunk = chunk.view(len(some), *shape[1:])
                _read(file, chunk)
                for each in others:
                    chunk = chunk.narrow(each.dim, each.first, some.shape[each.dim])
                some.copy_(chunk)

    def copy_elements(self, name: str, target: Tensor, *, first: int) -> None:
        """Copy a tensor's elements from index `first` into a contiguous `target` of its dtype.

        The index counts elements in file order, regardless of the tensor's shape.
        """
        header = self._headers[name]
        assert not isinstance(header, StoredWeight), "a checkpoint's tensors are not quantised"
        assert target.dtype == _dtype(name, header), "the caller allocates the file's dtype"
        with self._opened(header, at_byte=first * target.element_size()) as file:
            _read(file, target)

    def _copy_dequantized(
        self, name: str, weight: StoredWeight, target: Tensor, *, first: int, parts: list[Part]
    ) -> None:
        """Copy rows of a quantised weight from row `first` on; of each row, copy only `parts`."""
        read = open_rows(name, weight, self._stored_rows)
        row_bytes = weight.num_elements() // weight.shape[0] * torch.float32.itemsize
        at_once = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(0, target.shape[0], at_once):
            some = target[start : start + at_once]
            value = read(first + start, len(some))
            for each in parts:
                value = value.narrow(each.dim, each.first, some.shape[each.dim])
            some.copy_(value)

    def _stored_rows(
        self, header: TensorHeader, first: int = 0, count: int | None = None
    ) -> Tensor:
        """Read a part of a quantised weight, or `count` of its rows from row `first` on."""
        rows = header.shape[0] if header.shape else 1
        size = rows - first if count is None else count
        shape = (size, *header.shape[1:]) if header.shape else ()
        found = torch.empty(shape, dtype=_QUANTIZED_DTYPES[header.dtype])
        with self._opened(header, at_byte=first * (header.num_bytes() // max(1, rows))) as file:
            _read(file, found)
        return found

    @contextmanager
    def _opened(self, header: TensorHeader, *, at_byte: int) -> Iterator[io.BufferedReader]:
        """Open a tensor's file at a byte of the tensor; turn every OSError into CheckpointError."""
        try:
            with open_regular(header.path) as file:
                file.seek(header.start + at_byte)
                yield file
        except OSError as error:
            raise CheckpointError(
                f"{header.path}: {error.strerror or error}. {self._fix}"
            ) from None


class DeferredTensor:
    """A tensor of a mapping that is only read when transformers' loader indexes it."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str) -> None:
        self._tensors = tensors
        self._name = name

    def __getitem__(self, place: Any) -> Tensor:
        """Read the tensor and return the part with this index."""
        return self._tensors[self._name][place]


class PlannedTensors(LazyTensors):
    """Tensors that are not read: `copy_in` only records where each tensor would be copied."""

    def __init__(self, folder: Path, *, like: LazyTensors | None = None) -> None:
        """Read the headers of `folder`. If `like` is given, the shapes are taken from `like`."""
        super().__init__(folder)
        self._like = like
        self.targets: dict[str, Tensor] = {}
        """The model's tensors that `copy_in` would set. The keys are the names of the file's
        tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return super().shape(name) if self._like is None else self._like.shape(name)


def path_on_all_ranks(path: Path | None, world: World) -> Path | None:
    """Return rank 0's `path`, a file or folder of weights, if all ranks see it; otherwise None.

    All ranks see the path if the disk is shared or each node has a copy. On other ranks, `path` is
    ignored.
    """
    main_path = world.broadcast(str(path.resolve()) if path else "", str)
    found = world.gather(files_identity(Path(main_path)) if main_path else "", str)
    return Path(main_path) if found[0] and len(set(found)) == 1 else None


def files_identity(path: Path) -> str:
    """Return a hash that identifies a folder's weights or a single file; "" if unreadable.

    The hash covers the headers, each file's size and last 64 KiB, and a checkpoint's manifest,
    which has the sha256 of each file. Hashing the full files would take as long as reading the
    model.
    """
    try:
        headers = weight_headers(path) if path.is_dir() else file_headers(path)
        digest = hashlib.sha256(repr(sorted(headers.items())).encode())
        with suppress(FileNotFoundError):
            digest.update(read_bytes((path if path.is_dir() else path.parent) / MANIFEST_FILE))
        for each in sorted({header.path for header in headers.values()}):
            with open_regular(each) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                digest.update(f"{size}".encode() + file.read())
    except (CheckpointError, OSError):
        return ""
    return digest.hexdigest()


def shape_in(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Return the shape of a tensor; read the tensor only if necessary."""
    return tensors.shape(name) if isinstance(tensors, LazyTensors) else tuple(tensors[name].shape)


def kind_in(tensors: Mapping[str, Tensor], name: str) -> str:
    """Return a tensor's dtype as the file format names it; read the tensor only if necessary."""
    if isinstance(tensors, LazyTensors):
        return tensors.kind(name)
    return _KINDS.get(tensors[name].dtype, str(tensors[name].dtype))


def without(tensors: Mapping[str, Tensor], name: str) -> Mapping[str, Tensor]:
    """Return the same mapping without `name`."""
    if isinstance(tensors, LazyTensors):
        return tensors.without(name)
    return {each: value for each, value in tensors.items() if each != name}


def copy_in(tensors: Mapping[str, Tensor], name: str, target: Tensor) -> None:
    """Copy a tensor into `target`, in chunks if it comes from a file.

    For a tensor sharded over ranks, copy only this rank's shard.
    """
    shared: Any = target
    if isinstance(tensors, PlannedTensors):
        tensors.targets[name] = target
    elif isinstance(tensors, LazyTensors) and hasattr(target, "placements"):
        tensors.copy_to(name, shared.to_local(), part_of(shared))
    elif isinstance(tensors, LazyTensors):
        tensors.copy_to(name, target)
    else:
        target.detach().copy_(tensors[name])


def part_of(shared: Any) -> Part:
    """Return this rank's part of a DTensor.

    DTensor is not imported, because the import takes a second.
    """
    ((axis, dim),) = (
        (axis, each.dim) for axis, each in enumerate(shared.placements) if each.is_shard()
    )
    each = -(-shared.shape[dim] // shared.device_mesh.size(axis))
    place = shared.device_mesh.get_coordinate()[axis]
    return Part(dim=dim, first=min(place * each, shared.shape[dim]))


def _dtype(name: str, header: TensorHeader, *, trained: bool = False) -> torch.dtype:
    dtype = _DTYPES.get(header.dtype)
    if dtype is None or (trained and not header.is_weight()):
        raise CheckpointError(
            f"{header.path}: {name} is {header.dtype}: quantised weights cannot be trained. Use "
            "the model in bf16 or fp32."
        )
    return dtype


def _read(file: io.BufferedReader, target: Tensor) -> None:
    """Fill a contiguous tensor with the file's next bytes, little-endian as in torch."""
    if not target.numel():
        return
    # Viewed as bytes, since numpy has no bf16; flattened, since torch cannot view a scalar as
    # bytes.
    content: memoryview = target.reshape(-1).view(torch.uint8).numpy().data
    while content:
        count = file.readinto(content)
        if not count:
            raise OSError("The file ends before its last tensor")
        content = content[count:]
