"""compressed-tensors: quant_method `compressed-tensors`, the format that llm-compressor writes.

The formats of a linear's weight W (O outputs, I inputs; G groups); a file can mix them:

- `float-quantized`, `int-quantized`, `naive-quantized`: `W` in F8_E4M3 or I8, `W_scale` and, for
  asymmetric integers, `W_zero_point`: one value for the weight, or one per output, group or block.
- `pack-quantized`: `W_packed`, I32 (O, ceil(I x bits / 32)): numbers of 2, 4 or 8 bits in order,
  the first in the low bits, each stored plus 2 ** (bits - 1). `W_scale` (O, G), `W_shape` = [O, I].
  Asymmetric weights have `W_zero_point`, I32 (ceil(O x bits / 32), G), packed along the outputs.
  In older files, `W_g_idx` (I,) is the group of each input.
- `nvfp4-pack-quantized`: `W_packed`, U8 (O, I / 2), two 4-bit floats (E2M1) in a byte; `W_scale`,
  F8_E4M3 (O, I / 16); a group's factor is its scale / `W_global_scale`.
- `mxfp4-pack-quantized`: the same `W_packed`; `W_scale`, U8 (O, I / 32); a group's factor
  is 2 ** (`W_scale` - 127).

Weight = (number - zero) x scale, rounded to the dtype of the scale, or to bf16 for 4-bit floats.
Source: the package compressed-tensors 0.20.1, compressors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.core.regular_files import open_regular
from payload.core.validation.fields import checked
from payload.core.validation.records import build
from payload.formats.quantized.fp8 import FLOAT8, scale_block
from payload.formats.quantized.stored_weight import (
    CONFIG_FIX,
    INT32_BITS,
    Format,
    StoredWeight,
    described,
    group_size,
    part,
    refuse,
    require_kind,
    stored,
)
from payload.formats.tensor_headers import DTYPE_BYTES, FLOAT_DTYPES, TensorHeader

_PACKED = "_packed"
_FORMATS = (
    *("pack-quantized", "float-quantized", "int-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense"),
)
_PACKED_BITS = (2, 4, 8)
_NVFP4_GROUP, _MXFP4_GROUP = 16, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    num_bits: int = checked(8, low=1, high=64)
    group_size: int | None = checked(None, low=-1, high=2**20)
    block_structure: tuple[int, int] | None = checked(None, low=1, high=2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    format: str | None = checked(None, max_chars=60)
    weights: _Numbers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sparsity:
    format: str = checked("dense", max_chars=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    format: str = checked("dense", max_chars=60)
    config_groups: Mapping[str, _Group] = checked(max_items=1000)
    sparsity_config: _Sparsity | None = None


class CompressedTensors(Format):
    """Finds the weights of compressed-tensors by the names and dtypes of their tensors."""

    unused = (
        *(".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale"),
        *(".k_scale", ".v_scale", ".q_scale"),
    )

    def __init__(self, config: Mapping[str, Any], *, where: str, has_data: bool) -> None:
        """Read quantization_config.

        If `has_data` is False, the shapes of packed weights are derived from the packed tensors.

        Raises CheckpointError for unsupported formats.
        """
        self._has_data = has_data
        for key in ("sparsity_config", "transform_config"):
            if config.get(key) == {}:
                config = {name: value for name, value in config.items() if name != key}
        read = build(_Settings, config, where=where, fix=CONFIG_FIX, error=CheckpointError)
        formats = {read.format, *(each.format for each in read.config_groups.values())}
        for name in sorted(each for each in formats if each and each not in _FORMATS):
            raise CheckpointError(f"{where}: format = {shown(name)}: {_not_supported(name)}")
        if read.sparsity_config is not None and read.sparsity_config.format != "dense":
            raise CheckpointError(
                f"{where}: sparsity_config.format = {shown(read.sparsity_config.format)}: "
                f"{_not_supported(read.sparsity_config.format)}"
            )
        if config.get("transform_config") is not None:
            raise CheckpointError(
                f"{where}: transform_config: rotated weights cannot be dequantised. {CONFIG_FIX}"
            )
        self._name = read.format
        self._numbers = tuple(each.weights for each in read.config_groups.values() if each.weights)

    def describe(self) -> str:
        """Return the package's name and the format."""
        return f"compressed-tensors ({self._name})"

    def weights(
        self, headers: Mapping[str, TensorHeader], *, dtype: str
    ) -> Iterator[tuple[str, StoredWeight]]:
        """Yield each quantised weight."""
        for name, values in headers.items():
            if name.endswith(f"weight{_PACKED}"):
                weight = name.removesuffix(_PACKED)
                read = self._integers if values.dtype == "I32" else self._floats
                yield read(weight, values, headers, dtype=dtype)
            elif name.rpartition(".")[2] == "weight" and values.dtype in (*FLOAT8, "I8"):
                yield self._scaled(name, values, headers, dtype=dtype)

    def _scaled(
        self,
        name: str,
        values: TensorHeader,
        headers: Mapping[str, TensorHeader],
        *,
        dtype: str,
    ) -> tuple[str, StoredWeight]:
        """Return a weight that is stored in the shape of the original."""
        scales_name, zeros_name = f"{name}_scale", f"{name}_zero_point"
        scales = part(headers, scales_name, weight=values)
        blocks = [each.block_structure for each in self._numbers if each.block_structure]
        sizes = [each.group_size for each in self._numbers if each.group_size]
        blocks += [(1, size) for size in sizes if size > 0]
        block = scale_block(values.shape, scales, scales_name, configured=blocks)
        parts = {"scales": scales}
        if (zeros := headers.get(zeros_name)) is not None:
            require_kind(zeros, zeros_name, dtypes=(values.dtype, "I8"), shape=scales.shape)
            parts["zeros"] = zeros
        return stored(
            name,
            values,
            parts=parts,
            layout="scaled",
            shape=values.shape,
            dtype=dtype,
            bits=8,
            block=block,
            rounded_to=scales.dtype,
        )

    def _integers(
        self,
        name: str,
        values: TensorHeader,
        headers: Mapping[str, TensorHeader],
        *,
        dtype: str,
    ) -> tuple[str, StoredWeight]:
        """Return a weight of packed integers."""
        if len(values.shape) != 2 or 0 in values.shape:
            refuse(values, f"{name}{_PACKED}", f"is {described(values)}, but must be a matrix")
        scales_name, zeros_name = f"{name}_scale", f"{name}_zero_point"
        scales, zeros = part(headers, scales_name, weight=values), headers.get(zeros_name)
        groups = scales.shape[1] if len(scales.shape) == 2 else 1
        outputs, inputs, numbers = self._packed_shape(name, values, headers, groups=groups)
        size = group_size(inputs, groups, configured=numbers.group_size)
        if size is None:
            refuse(
                scales,
                scales_name,
                f"has {groups} groups, which do not fit a weight of {[outputs, inputs]} with "
                f"group_size = {numbers.group_size}",
            )
        shape = scales.shape if scales.num_elements() == 1 else (outputs, groups)
        require_kind(scales, scales_name, dtypes=FLOAT_DTYPES, shape=shape)
        parts = {"scales": scales}
        if zeros is not None:
            words = -(-outputs * numbers.num_bits // INT32_BITS)
            require_kind(zeros, zeros_name, dtypes=("I32",), shape=(words, groups))
            parts["zeros"] = zeros
        if (indices := headers.get(f"{name}_g_idx")) is not None:
            require_kind(indices, f"{name}_g_idx", dtypes=("I32", "I64"), shape=(inputs,))
            parts["groups"] = indices
        if (stated := headers.get(f"{name}_shape")) is not None:
            parts["shape"] = stated
        return stored(
            name,
            values,
            parts=parts,
            layout="packed",
            shape=(outputs, inputs),
            dtype=dtype,
            bits=numbers.num_bits,
            block=(outputs if scales.shape != (outputs, groups) else 1, size),
            rounded_to=scales.dtype,
        )

    def _packed_shape(
        self,
        name: str,
        values: TensorHeader,
        headers: Mapping[str, TensorHeader],
        *,
        groups: int,
    ) -> tuple[int, int, _Numbers]:
        """Return how many outputs and inputs a packed weight has, and the weight's settings.

        Several settings can fit the number of bits. Settings with a group size that fits `groups`
        are preferred.
        """
        stated = headers.get(f"{name}_shape")
        outputs, words = values.shape
        found: list[tuple[int, int, _Numbers]] = []
        for numbers in self._numbers:
            inputs = words * INT32_BITS // numbers.num_bits
            if stated is not None and self._has_data:
                require_kind(stated, f"{name}_shape", dtypes=("I32", "I64"), shape=(2,))
                rows, inputs = _two_integers(stated)
                if rows != outputs or not 1 <= inputs < 2**48:
                    continue
            if -(-inputs * numbers.num_bits // INT32_BITS) == words:
                if numbers.num_bits not in _PACKED_BITS:
                    refuse(
                        values,
                        f"{name}{_PACKED}",
                        f"has numbers of {numbers.num_bits} bits, but only 2, 4 and 8 can be "
                        "dequantised",
                    )
                if group_size(inputs, groups, configured=numbers.group_size) is not None:
                    return outputs, inputs, numbers
                found.append((outputs, inputs, numbers))
        if found:
            return found[0]
        refuse(
            values,
            f"{name}{_PACKED}",
            f"has the shape {list(values.shape)}, which does not fit {name}_shape and the "
            "number of bits in config.json",
        )

    def _floats(
        self,
        name: str,
        values: TensorHeader,
        headers: Mapping[str, TensorHeader],
        *,
        dtype: str,
    ) -> tuple[str, StoredWeight]:
        """Return a weight of packed 4-bit floats."""
        if values.dtype != "U8" or len(values.shape) != 2 or 0 in values.shape:
            refuse(
                values, f"{name}{_PACKED}", f"is {described(values)}, but must be a matrix of U8"
            )
        outputs, inputs = values.shape[0], values.shape[1] * 2
        scales_name, total_name = f"{name}_scale", f"{name}_global_scale"
        scales, total = part(headers, scales_name, weight=values), headers.get(total_name)
        parts, size, kinds = {"scales": scales}, _MXFP4_GROUP, ("U8", "F8_E8M0")
        if total is not None:
            if total.dtype != "F32" or total.num_elements() != 1:
                refuse(total, total_name, f"is {described(total)}, but must be a single F32")
            parts["total"], size, kinds = total, _NVFP4_GROUP, ("F8_E4M3", "")
        require_kind(scales, scales_name, dtypes=kinds, shape=(outputs, -(-inputs // size)))
        return stored(
            name,
            values,
            parts=parts,
            layout="scaled",
            shape=(outputs, inputs),
            dtype=dtype,
            bits=4,
            block=(1, size),
            rounded_to="BF16",
        )


def _two_integers(header: TensorHeader) -> tuple[int, int]:
    """Read a tensor that holds two integers. Raises CheckpointError."""
    size = DTYPE_BYTES[header.dtype]
    try:
        with open_regular(header.path) as file:
            file.seek(header.start)
            content = file.read(2 * size)
    except OSError as error:
        raise CheckpointError(f"{header.path}: {error.strerror}. {CONFIG_FIX}") from None
    rows = int.from_bytes(content[:size], "little", signed=True)
    return rows, int.from_bytes(content[size:], "little", signed=True)


def _not_supported(name: str) -> str:
    others = ", ".join(each for each in _FORMATS if each != "dense")
    return f"cannot be dequantised; the formats are {others}. {CONFIG_FIX}" if name else ""
