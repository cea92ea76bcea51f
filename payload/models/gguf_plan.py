"""Describes the part of a GGUF file that config.json determines: metadata and tensors.

Both the export and the import of GGUF files follow this plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.(.+)")
"""Matches the path of a module in a layer: the layer's index, and the module's name in the layer.
"""
_EXPERT = re.compile(r"\.experts(\.\d+)\.")
_NORM = "norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """One tensor of a GGUF file, and how it differs from the model's tensors."""

    name: str
    sources: tuple[str, ...]
    """Names of the source tensors in the model. Several names are the matrices of experts. In the
    file, they become a stack."""
    shape: tuple[int, ...]
    """Shape in the file, rows first as in torch."""
    part: int = 0
    """Index of this part among `parts` equal parts of the source's rows."""
    parts: int = 1
    heads: int | None = None
    """Number of heads, for a tensor in which llama.cpp reorders each head's rows; None = rows keep
    their order."""
    is_transposed: bool = False
    """True if the model stores the matrix as (in, out)."""
    shift: float = 0.0
    """Constant that is added to the model's values before they are written to the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlan:
    """The metadata of a GGUF file and how its tensors are converted, with llama.cpp's names."""

    architecture: str
    """llama.cpp's name of the architecture."""
    values: Mapping[str, int | float | str]
    """Metadata by key, without the architecture's prefix."""
    vocab_size: int
    """Rows of the token embedding."""
    names: Mapping[str, tuple[str, ...]]
    """Names of each module in the file, without the layer's prefix. If a module has several names,
    its rows are divided equally among the names."""
    rotated_heads: Mapping[str, int] = field(default_factory=dict)
    """Projections in which llama.cpp reorders the rows: number of heads by the end of the
    projection's name."""
    prefix: str = ""
    """Prefix of all tensor names in transformers. Some files omit this prefix."""
    norm_shift: float = 0.0
    """Constant that is added to the weight of every norm."""
    transposed: tuple[str, ...] = ()
    """Ends of the names of matrices that the Hugging Face layout stores as (in, out)."""
    rope_factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Additional tensors by llama.cpp's names. They contain divisors of the rotary frequencies."""
    notes: tuple[str, ...] = ()
    """Differences in how other programs read the file, one sentence each."""

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> list[FileTensor]:
        """Return the file's tensors for a model with tensors of these shapes.

        Raises CheckpointError for a tensor that the architecture does not have in llama.cpp.
        """
        found = []
        for key, sources in _stacks(shapes).items():
            names = self._names(key)
            for part, name in enumerate(names):
                found.append(self._tensor(name, sources, shapes[sources[0]], part, len(names)))
        return found

    def _tensor(
        self, name: str, sources: tuple[str, ...], size: tuple[int, ...], part: int, parts: int
    ) -> FileTensor:
        source = sources[0]
        is_transposed = bool(self.transposed) and source.endswith(self.transposed)
        shape = size[::-1] if is_transposed else size
        shape = (shape[0] // parts, *shape[1:])
        heads = [count for end, count in self.rotated_heads.items() if source.endswith(end)]
        return FileTensor(
            name=name,
            sources=sources,
            shape=(len(sources), *shape) if _EXPERT.search(source) else shape,
            part=part,
            parts=parts,
            heads=heads[0] if heads else None,
            is_transposed=is_transposed,
            shift=self.norm_shift if source.endswith(_NORM) else 0.0,
        )

    def _names(self, source: str) -> list[str]:
        """Return the names that the parts of a tensor have in the file. Raises CheckpointError."""
        full = source if source.startswith(self.prefix) else self.prefix + source
        module, _, kind = full.rpartition(".")
        layer = _LAYER.search(module)
        names = self.names.get(module if layer is None else layer[2])
        if names is None:
            raise CheckpointError(
                f"tensor {shown(source)}: not supported by llama.cpp's {self.architecture}. "
                "Use --format hf."
            )
        start = "" if layer is None else f"blk.{layer[1]}."
        return [f"{start}{name}.{kind}" for name in names]


def _stacks(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the model's tensors that form each tensor of the file: one tensor, or one per
    expert."""
    found: dict[str, dict[int, str]] = {}
    for name in shapes:
        match = _EXPERT.search(name)
        start, end = (0, 0) if match is None else match.span(1)
        found.setdefault(name[:start] + name[end:], {})[int(name[start + 1 : end] or 0)] = name
    return {key: tuple(names[each] for each in sorted(names)) for key, names in found.items()}
