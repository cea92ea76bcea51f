"""Reads the metadata and tensor sizes in a GGUF file's header, without any package.

The file may be untrusted, so every count, size and offset is checked before use. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NoReturn

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.core.regular_files import open_regular

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS: Mapping[int, str] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_BLOCKS: Mapping[int, tuple[int, int]] = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    30: (1, 2),
}
"""Number of elements and of bytes in a block, by ggml's index of the type: F32, F16, Q4_0, ...
BF16."""

_MAX_ENTRIES = 2**16
_MAX_ARRAY = 2**22
_MAX_STRING = 2**22
_TOKENS: Mapping[str, str] = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}
_MAX_ITEMS = 2**10
_MAX_FACTORS = 2**13
_FLOAT = 6
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Names of the tensors that contain divisors of the rotary frequencies. These values become part of
the config."""
_FIX = "Download it again, or use a folder in the Hugging Face layout."


@dataclass(frozen=True, slots=True)
class Array:
    """A metadata array. For a long array, only the length is kept."""

    length: int
    items: tuple[int | float | bool, ...] = field(default=(), repr=False, compare=False)
    """The numbers of an array with at most 1024 numbers, such as one for each layer."""


Value = str | int | float | bool | Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where and how a file stores a tensor."""

    kind: int
    """ggml's index of the type."""
    start: int
    """Offset of the first byte, from the start of the file or of the data."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The header, which precedes the tensors' data."""

    values: Mapping[str, Value]
    """Metadata by key. An fp32 number is given as the shortest decimal that rounds to the same
    bits."""
    shapes: Mapping[str, tuple[int, ...]]
    """Every tensor's shape by name, rows first as in torch."""
    places: Mapping[str, TensorPlace]
    """Every tensor's place in the file by name."""
    rope_factors: Mapping[str, tuple[float, ...]]
    """Contents of the tensors that divide the rotary frequencies, by name."""

    def of_architecture(self, kind: str) -> dict[str, Value]:
        """Return the metadata of an architecture, without its prefix."""
        start = f"{kind}."
        found = {key: value for key, value in self.values.items() if key.startswith(start)}
        return {key.removeprefix(start): value for key, value in found.items()}

    def tokens(self) -> dict[str, Value]:
        """Return the special tokens as config.json names them."""
        keys = {name: f"tokenizer.ggml.{key}" for name, key in _TOKENS.items()}
        return {name: self.values[key] for name, key in keys.items() if key in self.values}


def read_header(path: Path) -> GgufHeader:
    """Return the file's header. Raises CheckpointError for a damaged file or a different format."""
    try:
        with open_regular(path) as file:
            return _Reader(file, path).header()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. {_FIX}") from None


class _Reader:
    """Reads a file from its start."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._size = file.seek(0, 2)
        file.seek(0)

    def header(self) -> GgufHeader:
        if self._file.read(len(_MAGIC)) != _MAGIC:
            raise CheckpointError(f"{self._path}: not a GGUF file. {_FIX}")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path}: GGUF version {version}; only {_VERSIONS} are supported. {_FIX}"
            )
        tensors, entries = self._count(_MAX_ENTRIES), self._count(_MAX_ENTRIES)
        values: dict[str, Value] = {}
        for _ in range(entries):
            key = self._string()
            if key in values:
                self._refuse(f"two values of {shown(key)}")
            values[key] = self._value(int(self._number("<I")))
        found = [self._tensor() for _ in range(tensors)]
        shapes = {name: shape for name, shape, _ in found}
        places = {name: place for name, _, place in found}
        if len(shapes) < len(found):
            self._refuse("two tensors of one name")
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            self._refuse(f"general.alignment = {shown(alignment)}")
        start = math.ceil(self._file.tell() / alignment) * alignment
        end = max((place.start + place.num_bytes for place in places.values()), default=0)
        if not places:
            raise CheckpointError(f"{self._path}: its header lists no tensors. {_FIX}")
        if start + end > self._size:
            self._refuse(f"{self._size:,} bytes, but its header requires {start + end:,}")
        places = {name: replace(each, start=start + each.start) for name, each in places.items()}
        factors = {name: self._factors(name, places[name]) for name in _FACTORS if name in places}
        return GgufHeader(values=values, shapes=shapes, places=places, rope_factors=factors)

    def _factors(self, name: str, place: TensorPlace) -> tuple[float, ...]:
        """Return the contents of a short tensor in fp32."""
        count = place.num_bytes // 4
        if place.kind != 0 or count > _MAX_FACTORS:
            self._refuse(f"{name} has {count:,} numbers of ggml's type {place.kind}")
        self._file.seek(place.start)
        found = struct.unpack(f"<{count}f", self._bytes(place.num_bytes))
        return tuple(_shortest(each) for each in found)

    def _tensor(self) -> tuple[str, tuple[int, ...], TensorPlace]:
        """Return the name, shape and place of the next tensor in the header."""
        name, dims = self._string(), int(self._number("<I"))
        if not 1 <= dims <= 8:
            self._refuse(f"{shown(name)} has {dims} dimensions")
        # ggml lists the fastest dimension first.
        shape = tuple(int(self._number("<Q")) for _ in range(dims))[::-1]
        kind, offset = int(self._number("<I")), int(self._number("<Q"))
        if kind not in _BLOCKS:
            raise CheckpointError(
                f"{self._path}: {shown(name)} has ggml's type {kind}, which is not supported. Use "
                "a file in f16, bf16, q8_0 or one of the k-quants."
            )
        elements, size = _BLOCKS[kind]
        if not all(1 <= each <= 2**40 for each in shape) or shape[-1] % elements:
            self._refuse(f"{shown(name)} has the shape {list(shape)[:8]}")
        num_bytes = math.prod(shape) // elements * size
        return name, shape, TensorPlace(kind=kind, start=offset, num_bytes=num_bytes)

    def _value(self, kind: int) -> Value:
        if kind in _NUMBERS:
            found = self._number(_NUMBERS[kind])
            return _shortest(found) if kind == _FLOAT else found
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            self._refuse(f"a value of type {kind}")
        element, count = int(self._number("<I")), self._count(_MAX_ARRAY)
        if element in _NUMBERS:
            content = self._bytes(struct.calcsize(_NUMBERS[element]) * count)
            if count <= _MAX_ITEMS:
                return Array(count, struct.unpack(f"<{count}{_NUMBERS[element][1:]}", content))
        elif element == _STRING:
            for _ in range(count):
                self._bytes(self._count(_MAX_STRING))
        else:
            self._refuse(f"an array of type {element}")
        return Array(count)

    def _string(self) -> str:
        return self._bytes(self._count(_MAX_STRING)).decode("utf-8", errors="replace")

    def _count(self, most: int) -> int:
        found = int(self._number("<Q"))
        if found > most:
            self._refuse(f"a count of {found:,}")
        return found

    def _number(self, form: str) -> int | float | bool:
        found: int | float | bool = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return found

    def _bytes(self, count: int) -> bytes:
        content = self._file.read(count)
        if len(content) < count:
            self._refuse(f"its header ends after {self._size:,} bytes")
        return content

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {what}: the file is truncated or damaged. {_FIX}")


def _shortest(value: float) -> float:
    """Return the shortest decimal number that has the same bits in fp32."""
    for digits in range(1, 9):
        found = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", found) == struct.pack("<f", value):
                return found
        except OverflowError:  # rounded up to more than the largest number
            continue
    return value
