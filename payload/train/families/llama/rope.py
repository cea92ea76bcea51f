"""Rotary position embeddings: frequencies, tables of cosines and sines, and their application.

Source: https://arxiv.org/abs/2104.09864, in the layout of the Hugging Face checkpoints: the two
elements of a pair are half a head apart.
Shapes: B batch, H heads, T tokens, D width of a head, R elements of a head that are rotated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from payload.models.llama.rope import Rope

Table = tuple[Tensor, Tensor]
"""Cosines and sines, (T, R / 2) fp32 each."""


def frequencies(rope: Rope, *, head_dim: int, is_long: bool = False) -> Tensor:
    """Return the angle per position of each pair of rotated elements, (R / 2,) fp32.

    `is_long` is True for texts longer than the rope's original context.
    """
    width = rope.rotated or head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    if rope.kind == "longrope":
        factors = torch.tensor(rope.long_factors if is_long else rope.short_factors)
        return 1.0 / (factors * rope.theta**exponents)
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    return plain


def table(angles: Tensor, *, start: int, length: int, factor: float = 1.0) -> Table:
    """Return cosines and sines of the positions `start` to `start + length`, times `factor`."""
    positions = torch.arange(start, start + length, dtype=torch.float32, device=angles.device)
    turned = positions[:, None] * angles
    cos, sin = turned.cos(), turned.sin()
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def rotated(x: Tensor, rope: Table) -> Tensor:
    """Rotate the pairs of `x`, (B, H, T, D); the elements from R on are unchanged."""
    cos, sin = rope
    width = 2 * cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*turned, x[..., width:]), dim=-1)


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Divide low frequencies by `rope.factor`, keep high frequencies, and blend in between.

    Source: https://github.com/meta-llama/llama-models, models/llama3/model.py, apply_scaling.
    """
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    slowed = plain / rope.factor
    share = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - share) * slowed + share * plain
    scaled = torch.where(wavelengths > longest, slowed, plain)
    is_between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(is_between, between, scaled)


def _yarn(plain: Tensor, rope: Rope) -> Tensor:
    """Divide low frequencies by `rope.factor`, keep high frequencies, and blend on the ramp.

    Source: https://arxiv.org/abs/2309.00071, section 3.2.
    """
    first, last = rope.ramp
    last += 0.001 if first == last else 0.0
    numbers = torch.arange(len(plain), dtype=torch.float32)
    kept = 1 - ((numbers - first) / (last - first)).clamp(0, 1)
    return plain / rope.factor * (1 - kept) + plain * kept
