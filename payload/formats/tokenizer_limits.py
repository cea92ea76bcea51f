"""Rejects a tokenizer.json on which the package `tokenizers` would abort or fill the memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.core.errors import TileforgeError
from payload.core.printable_text import shown
from payload.formats.tokenizer_canonical import flat_steps

_MAX_GROWTH = 64
"""Limit on the factor by which all steps together can lengthen a text. In usual files, the factor
is 1."""
_FIX = "Repair the folder, or use another folder."


def require_bounded(raw: Mapping[str, Any], *, where: str, error: type[TileforgeError]) -> None:
    """Raise `error` for merges that the package cannot read, and steps that lengthen text too much.

    A step of the kind `Precompiled` is not limited.
    """
    _require_prefixed_merges(raw["model"], where=where, error=error)
    for part, inner in (("normalizer", "normalizers"), ("decoder", "decoders")):
        growth = 1.0
        for step in flat_steps(raw.get(part), inner=inner):
            growth *= _growth(step)
        if growth > _MAX_GROWTH:
            raise error(
                f"{where}: its {part} can make a text {growth:.0f} times as long; at most "
                f"{_MAX_GROWTH} times is allowed. {_FIX}"
            )


def _growth(step: Any) -> float:
    """Return the largest factor by which a step can lengthen a non-empty text."""
    if not isinstance(step, Mapping):
        return 1.0
    if step.get("type") == "Prepend":
        return float(max(1, len(str(step.get("prepend", "")))))
    if step.get("type") != "Replace":
        return 1.0
    pattern = step.get("pattern")
    searched = pattern.get("String") if isinstance(pattern, Mapping) else None
    # A regular expression can match a single character.
    length = len(searched) if isinstance(searched, str) else 1
    return max(1.0, len(str(step.get("content", ""))) / max(1, length))


def _require_prefixed_merges(
    model: Mapping[str, Any], *, where: str, error: type[TileforgeError]
) -> None:
    """Raise `error` for a merge in which the second half lacks the prefix of subwords.

    The package cuts the prefix off without a check. The resulting panic can abort the process.
    """
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not (isinstance(prefix, str) and prefix and isinstance(merges, list)):
        return
    for merge in merges:
        halves = merge.split(" ") if isinstance(merge, str) else merge
        second = halves[-1] if isinstance(halves, list) and halves else None
        if not (isinstance(second, str) and second.startswith(prefix)):
            raise error(
                f"{where}: the merge {shown(merge)} lacks model.continuing_subword_prefix = "
                f"{shown(prefix)}. {_FIX}"
            )
