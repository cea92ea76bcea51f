"""AWQ: quant_method `awq`, with 4-bit integers in AutoAWQ's layout `gemm`.

A linear has I inputs and O outputs, with G groups of inputs; an int32 holds eight numbers:

- `qweight`, I32 (I, O / 8), and `qzeros`, I32 (G, O / 8), packed along the outputs. An int32
  holds eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7, the first in the low bits.
- `scales`, float (G, O). Input i is in group i // group_size.

Weight[o, i] = (number[i, o] - zero[g, o]) x scale[g, o], rounded to the dtype of the scales.
Source: AutoAWQ 0.2.9, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.formats.quantized.packed_linear import (
    describe_groups,
    grouped_linear,
    packed_linears,
    read_settings,
)
from payload.formats.quantized.stored_weight import CONFIG_FIX, INT32_BITS, Format, StoredWeight
from payload.formats.tensor_headers import TensorHeader

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Indices of the eight outputs that an int32 holds, from the lowest bits up."""
BITS = 4
_PER_WORD = INT32_BITS // BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    bits: int = checked(choices=(BITS,))
    group_size: int = checked(low=-1, high=2**20)
    version: str | None = checked(None, max_chars=40)
    format: str | None = checked(None, max_chars=40)


class Awq(Format):
    """Linears with integer weights that are packed along the outputs."""

    def __init__(self, config: Mapping[str, Any], *, where: str) -> None:
        """Read quantization_config. Raises CheckpointError for an unsupported layout."""
        read = read_settings(_Settings, config, where=where)
        key, name = "version" if read.version else "format", read.version or read.format or "gemm"
        if name.lower() != "gemm":
            raise CheckpointError(
                f"{where}: {key} = {shown(name)}: only AWQ's layout 'gemm' can be dequantised. "
                f"{CONFIG_FIX}"
            )
        self._group_size = read.group_size

    def describe(self) -> str:
        """Return the format, the number of bits and the group size."""
        return describe_groups("AWQ", bits=BITS, group_size=self._group_size)

    def weights(
        self, headers: Mapping[str, TensorHeader], *, dtype: str
    ) -> Iterator[tuple[str, StoredWeight]]:
        """Yield each linear."""
        for module, values in packed_linears(headers):
            inputs, words = values.shape
            yield grouped_linear(
                module,
                values,
                headers,
                shape=(words * _PER_WORD, inputs),
                layout="awq",
                bits=BITS,
                configured_size=self._group_size,
                dtype=dtype,
            )
