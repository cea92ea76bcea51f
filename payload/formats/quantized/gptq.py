"""GPTQ: quant_method `gptq`, integers of 2, 4 or 8 bits with a scale and a zero for each group.

A linear has I inputs and O outputs, with G groups. An int32 holds P = 32 / bits numbers, the first
in the low bits:

- `qweight`, I32 (I / P, O): number i of a column is in row i // P, at bit (i % P) x bits.
- `qzeros`, I32 (G, O / P): packed along the outputs. The format `gptq` stores zero - 1 modulo
  2 ** bits, as AutoGPTQ's and ExLlama's kernels read it; `gptq_v2` stores the zero itself.
- `scales`, float (G, O), and `g_idx`, I32 (I,): the group of each input. Without `g_idx`, input i
  is in group i // group_size.

Weight[o, i] = (number[i, o] - zero[g, o]) x scale[g, o], rounded to the dtype of the scales.
Source: AutoGPTQ 0.7.1, nn_modules/qlinear/qlinear_cuda_old.py; GPTQModel, nn_modules/qlinear.
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

_FORMATS: Mapping[str, int] = {"gptq": 1, "gptq_v2": 0}
"""For each format, the number to add to a stored zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    bits: int = checked(choices=(2, 4, 8))
    group_size: int = checked(low=-1, high=2**20)
    checkpoint_format: str | None = checked(None, max_chars=40)
    format: str | None = checked(None, max_chars=40)


class Gptq(Format):
    """Linears with integer weights that are packed along the inputs."""

    def __init__(self, config: Mapping[str, Any], *, where: str) -> None:
        """Read quantization_config. Raises CheckpointError for an unsupported layout."""
        read = read_settings(_Settings, config, where=where)
        name = read.checkpoint_format or read.format or "gptq"
        if name not in _FORMATS:
            key = "checkpoint_format" if read.checkpoint_format else "format"
            raise CheckpointError(
                f"{where}: {key} = {shown(name)}: must be one of {', '.join(_FORMATS)}. "
                f"{CONFIG_FIX}"
            )
        self._bits, self._group_size = read.bits, read.group_size
        self._zero_offset = _FORMATS[name]

    def describe(self) -> str:
        """Return the format, the number of bits and the group size."""
        return describe_groups("GPTQ", bits=self._bits, group_size=self._group_size)

    def weights(
        self, headers: Mapping[str, TensorHeader], *, dtype: str
    ) -> Iterator[tuple[str, StoredWeight]]:
        """Yield each linear."""
        per_word = INT32_BITS // self._bits
        for module, values in packed_linears(headers):
            rows, outputs = values.shape
            yield grouped_linear(
                module,
                values,
                headers,
                shape=(outputs, rows * per_word),
                layout="gptq",
                bits=self._bits,
                configured_size=self._group_size,
                dtype=dtype,
                zero_offset=self._zero_offset,
            )
