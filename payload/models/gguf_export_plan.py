"""Describes the part of an exported GGUF file that config.json determines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlan:
    """The metadata of a GGUF file and how its tensors are converted, with llama.cpp's names."""

    architecture: str
    """llama.cpp's name of the architecture."""
    values: Mapping[str, int | float | str]
    """Metadata by key, without the architecture's prefix."""
    num_layers: int
    vocab_size: int
    """Rows of the token embedding."""
    rotated_heads: Mapping[str, int]
    """Number of heads of each projection whose rows llama.cpp reorders, by the end of the name."""
    prefix: str = ""
    """Prefix of all tensor names in transformers, which some files omit."""
    renamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ends of module names that differ in llama.cpp's tables of transformers' names, each with the
    ends that replace it. If there are several, each gets an equal part of the rows."""
    norm_shift: float = 0.0
    """Constant that is added to the weight of every norm."""
    transposed: tuple[str, ...] = ()
    """Ends of the names of matrices that the Hugging Face layout stores as (in, out)."""
    rope_factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Additional tensors of divisors of the rotary frequencies, by llama.cpp's name."""
    stacks: re.Pattern[str] | None = None
    """Pattern whose group 1 matches the number of an expert in a tensor's name. The file has the
    matrices of all experts of a layer as one tensor. None = the model has no experts."""
    notes: tuple[str, ...] = ()
    """Differences in how other programs read the file, one sentence each."""
