"""The tensors in which llama.cpp stores divisors of the rotary frequencies."""

from __future__ import annotations

import math

from payload.models.llama.rope import Rope

LLAMA3, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


def rope_factors(rope: Rope, *, width: int) -> dict[str, tuple[float, ...]]:
    """Return llama.cpp's tensors of divisors for the frequencies, one per pair of elements."""
    if rope.kind == "longrope":
        return {LONG: rope.long_factors, SHORT: rope.short_factors}
    if rope.kind == "llama3":
        return {LLAMA3: llama3_factors(rope, width=width)}
    return {}


def llama3_factors(rope: Rope, *, width: int) -> tuple[float, ...]:
    """Return the divisors of the frequencies for Llama 3's scaling."""
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    factors = []
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * rope.theta ** (i / width)
        if wavelength < shortest:
            factors.append(1.0)
        elif wavelength > longest:
            factors.append(rope.factor)
        else:
            share = (rope.original_context / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            factors.append(1 / ((1 - share) / rope.factor + share))
    return tuple(factors)
