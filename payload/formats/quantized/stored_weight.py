"""A weight that a checkpoint stores in several tensors, and checks of these tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from payload.core.errors import CheckpointError
from payload.formats.tensor_headers import TensorHeader

FIX = "Download the model again, or use the model in bf16."
CONFIG_FIX = "Use the model in bf16 or fp32."
INT32_BITS = 32

Layout = Literal["scaled", "mxfp4", "gptq", "awq", "packed"]
"""Name of the module in `payload.train.tensors.dequantize` that computes the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight(TensorHeader):
    """A weight that is dequantised while it is read. `dtype` and `shape` describe the result.

    `path` is the file of the first part.
    """

    layout: Layout
    parts: Mapping[str, TensorHeader]
    """The stored tensors. The keys are the kinds of tensors: values, scales, zeros and groups."""
    bits: int
    """Number of bits of a stored value."""
    block: tuple[int, int]
    """Size (rows, columns) of the block of the weight that shares one scale."""
    zero_offset: int = 0
    """Number that is added to each stored zero point."""
    rounded_to: str | None = None
    """Dtype to which the product is rounded before it is rounded to `dtype`. None means that the
    product is rounded only once."""


class Format(ABC):
    """A format of quantised checkpoints, with the settings that config.json gives."""

    unused: tuple[str, ...] = ()
    """Name suffixes of tensors that are not needed to dequantise a weight."""

    @abstractmethod
    def describe(self) -> str:
        """Return the format's name and settings for messages."""

    @abstractmethod
    def weights(
        self, headers: Mapping[str, TensorHeader], *, dtype: str
    ) -> Iterator[tuple[str, StoredWeight]]:
        """Yield each quantised weight's name and parts. `dtype` is the dtype after dequantisation.

        Raises CheckpointError for parts that are missing or do not fit together.
        """


def stored(
    name: str,
    values: TensorHeader,
    *,
    parts: Mapping[str, TensorHeader],
    layout: Layout,
    shape: tuple[int, ...],
    dtype: str,
    bits: int,
    block: tuple[int, int],
    zero_offset: int = 0,
    rounded_to: str | None = None,
) -> tuple[str, StoredWeight]:
    """Return a weight's name and parts. `values` is the tensor with the quantised numbers."""
    return name, StoredWeight(
        path=values.path,
        start=values.start,
        dtype=dtype,
        shape=shape,
        layout=layout,
        parts={"values": values, **parts},
        bits=bits,
        block=block,
        zero_offset=zero_offset,
        rounded_to=rounded_to,
    )


def part(headers: Mapping[str, TensorHeader], name: str, *, weight: TensorHeader) -> TensorHeader:
    """Return the tensor `name`, which `weight` needs. Raises CheckpointError if it is missing."""
    if name not in headers:
        refuse(weight, name, "the quantised weight lacks this tensor")
    return headers[name]


def require_kind(
    header: TensorHeader, name: str, *, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    """Raise CheckpointError if the tensor `name` has a different shape, or a dtype not in
    `dtypes`."""
    if header.dtype not in dtypes:
        refuse(header, name, f"is {header.dtype}, but must be {' or '.join(dtypes)}")
    if header.shape != shape:
        refuse(
            header,
            name,
            f"has the shape {list(header.shape)}, but its weight requires {list(shape)}",
        )


def refuse(header: TensorHeader, name: str, problem: str) -> NoReturn:
    """Raise CheckpointError with the file, the tensor, the problem and the fix."""
    raise CheckpointError(f"{header.path}: {name}: {problem}. {FIX}")


def described(header: TensorHeader) -> str:
    """Return a tensor's dtype and shape as text."""
    return f"{header.dtype} of the shape {list(header.shape)}"


def group_size(columns: int, groups: int, *, configured: int | None) -> int | None:
    """Return how many columns share a scale; None if `groups` groups do not fit `columns` columns.

    `configured` is the group size in config.json, where None and -1 mean all columns. The last
    group can be shorter.
    """
    size = min(configured, columns) if configured and configured > 0 else columns
    return size if -(-columns // size) == groups else None
