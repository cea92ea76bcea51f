"""The part of a written GGUF file that follows from a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlan:
    """Metadata of a GGUF file, and what becomes of the tensors, in llama.cpp's names."""

    architecture: str
    """llama.cpp's name."""
    values: Mapping[str, int | float | str]
    """By key, without the architecture that each begins with."""
    num_layers: int
    vocab_size: int
    """Rows of the token embedding."""
    rotated_heads: Mapping[str, int]
    """Heads of the projections whose rows llama.cpp has in another order, by the name's end."""
    prefix: str = ""
    """Beginning of every tensor's name in transformers, which some files leave out."""
    norm_shift: float = 0.0
    """Added to every norm's scale."""
    transposed: tuple[str, ...] = ()
    """Ends of the names of matrices that the Hugging Face layout stores as (in, out)."""
    rope_factors: tuple[float, ...] = ()
    """Divisors of the rotary frequencies; none = 1."""
    notes: tuple[str, ...] = ()
    """Differences in how other programs read the file, a sentence each."""
