"""Reads the parts of a quantised weight: scales, packed integers, 4-bit floats, groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from payload.formats.quantized.stored_weight import INT32_BITS, StoredWeight, refuse
from payload.formats.tensor_headers import TensorHeader

Rows = Callable[[int, int], Tensor]
"""Returns `count` rows of a weight from row `first` on."""
_EXPONENT_BIAS = 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class ReadRows(Protocol):
    """Reads a stored tensor, or `count` of its rows from row `first` on."""

    def __call__(self, header: TensorHeader, first: int = 0, count: int | None = None) -> Tensor:
        """Return the rows in the tensor's own dtype."""
        ...


def read_scales(
    name: str,
    weight: StoredWeight,
    read: ReadRows,
    first: int = 0,
    count: int | None = None,
    *,
    role: str = "scales",
) -> Tensor:
    """Return rows of a weight's scales in fp32.

    A scale that is stored as a byte is 2 ** (byte - 127); the byte 255 is NaN. A block of zeros has
    the scale zero. Raises CheckpointError for a scale that is infinite or NaN.
    """
    value = read(weight.parts[role], first, count)
    if value.dtype in (torch.uint8, torch.float8_e8m0fnu):
        bits = value.view(torch.uint8)
        found = powers_of_two(bits)
        found[bits == 2 * _EXPONENT_BIAS + 1] = torch.nan
    else:
        found = value.float()
    if not bool(found.isfinite().all()):
        bad = found[~found.isfinite()].flatten()[0].item()
        refuse(weight.parts[role], name, f"has a scale of {bad:g}")
    return found


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2 ** (exponent - 127) in fp32 for each of the `exponents`, which are bytes.

    Subnormal results are also exact.
    """
    shifted = exponents.to(torch.int32) - _EXPONENT_BIAS
    return torch.ldexp(torch.ones(exponents.shape), shifted)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack the integers of int32 words into a new last dimension, the lowest bits first."""
    shifts = torch.arange(0, INT32_BITS, bits, dtype=torch.int32)
    found: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return found


def floats_of_bytes(packed: Tensor) -> Tensor:
    """Return the two 4-bit floats (E2M1) of each byte in fp32, the low bits first."""
    table = torch.tensor([*_E2M1, *(-each for each in _E2M1)])
    found = packed.view(torch.uint8)
    both = torch.stack((found & 15, found >> 4), dim=-1).long()
    return table[both].flatten(-2)


def read_groups(name: str, weight: StoredWeight, read: ReadRows, *, groups: int) -> Tensor:
    """Return the group of each input. Raises CheckpointError for a group that does not exist."""
    header = weight.parts.get("groups")
    if header is None:
        return torch.arange(weight.shape[1]) // weight.block[1]
    found = read(header).long()
    if int(found.min()) < 0 or int(found.max()) >= groups:
        bad = int(found[(found < 0) | (found >= groups)][0])
        refuse(header, name, f"g_idx names group {bad}, but the weight has {groups} groups")
    return found
