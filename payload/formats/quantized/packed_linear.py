"""Linears of packed integers with a scale and a zero for each group, as in GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from payload.core.errors import CheckpointError
from payload.core.validation.records import build
from payload.formats.quantized.stored_weight import (
    CONFIG_FIX,
    INT32_BITS,
    Layout,
    StoredWeight,
    described,
    group_size,
    part,
    refuse,
    require_kind,
    stored,
)
from payload.formats.tensor_headers import FLOAT_DTYPES, TensorHeader

_VALUES = "qweight"
_T = TypeVar("_T")


def read_settings(kind: type[_T], config: Mapping[str, Any], *, where: str) -> _T:
    """Return the settings of a quantization_config. Raises CheckpointError for invalid settings."""
    read = build(kind, config, where=where, fix=CONFIG_FIX, error=CheckpointError)
    if config.get("group_size") == 0:
        raise CheckpointError(f"{where}: group_size = 0: must be at least 1, or -1. {CONFIG_FIX}")
    return read


def packed_linears(headers: Mapping[str, TensorHeader]) -> Iterator[tuple[str, TensorHeader]]:
    """Yield the module and the packed numbers of each linear.

    Raises CheckpointError for numbers that are not a matrix of I32.
    """
    for name, values in headers.items():
        module, _, last = name.rpartition(".")
        if last == _VALUES:
            if values.dtype != "I32" or len(values.shape) != 2 or 0 in values.shape:
                refuse(values, name, f"is {described(values)}, but must be a matrix of I32")
            yield module, values


def grouped_linear(
    module: str,
    values: TensorHeader,
    headers: Mapping[str, TensorHeader],
    *,
    shape: tuple[int, int],
    layout: Layout,
    bits: int,
    configured_size: int,
    dtype: str,
    zero_offset: int = 0,
) -> tuple[str, StoredWeight]:
    """Return a module's weight with its scales and zeros; `shape` is (outputs, inputs).

    Raises CheckpointError for parts that are missing or do not fit together.
    """
    outputs, inputs = shape
    scales_name, zeros_name, indices_name = (
        f"{module}.{each}" for each in ("scales", "qzeros", "g_idx")
    )
    scales = part(headers, scales_name, weight=values)
    zeros = part(headers, zeros_name, weight=values)
    groups = scales.shape[0] if scales.shape else 0
    size = group_size(inputs, groups, configured=configured_size)
    if size is None:
        refuse(
            scales,
            scales_name,
            f"has {groups} groups, which do not fit a weight of {list(shape)} with group_size = "
            f"{configured_size}",
        )
    words, rest = divmod(outputs * bits, INT32_BITS)
    if rest:
        refuse(
            values, f"{module}.{_VALUES}", f"has {outputs} outputs, which do not fill whole int32s"
        )
    require_kind(scales, scales_name, dtypes=FLOAT_DTYPES, shape=(groups, outputs))
    require_kind(zeros, zeros_name, dtypes=("I32",), shape=(groups, words))
    parts = {"scales": scales, "zeros": zeros}
    if (indices := headers.get(indices_name)) is not None:
        require_kind(indices, indices_name, dtypes=("I32", "I64"), shape=(inputs,))
        parts["groups"] = indices
    return stored(
        f"{module}.weight",
        values,
        parts=parts,
        layout=layout,
        shape=shape,
        dtype=dtype,
        bits=bits,
        block=(1, size),
        zero_offset=zero_offset,
        rounded_to=scales.dtype,
    )


def describe_groups(name: str, *, bits: int, group_size: int) -> str:
    """Return text with a format's name, number of bits and group size."""
    groups = f"groups of {group_size}" if group_size > 0 else "one group"
    return f"{name} ({bits} bits, {groups})"
