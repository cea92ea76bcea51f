"""Tensors that transformers leaves in a checkpoint's files: layers that predict further tokens.

Checkpoints of several families have such layers (multi-token prediction, MTP). transformers does
not build them, so they are neither trained nor saved. Some families store them as layers after the
last one of the model.
Source: transformers 5.23, `_keys_to_ignore_on_load_unexpected` of each class. A test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_QWEN = (r"^mtp.*", r"^model.visual.*")
_DOTS = (r"^model\.(language_model\.)?layers\.46\.", r"^model\.(language_model\.)?mtp\.")
IGNORED: Mapping[str, tuple[str, ...]] = {
    "bailing_hybrid": (r"model\.layers\.42\..*",),
    "deepseek_v3": (r"model\.layers\.61.*",),
    "deepseek_v32": (r"model\.layers\.61.*",),
    "deepseek_v4": (r"(^|\.)mtp\..*",),
    "dots3_note": _DOTS,
    "dots3_note_text": _DOTS,
    "ernie4_5_moe": (r"mtp",),
    "exaone_moe": (r"mtp.*",),
    "glm4_moe": (r"model\.layers\.92.*", r"model\.layers\.46.*"),
    "glm4_moe_lite": (r"model\.layers\.47.*",),
    "glm_moe_dsa": (r"model\.layers\.78.*",),
    "hy_v3": (r"model\.layers\.80.*",),
    "hy_v4": (r"model\.mtp_layers\..*",),
    "inkling_text": (r"model\.mtp\..*",),
    "longcat_flash": (r"model\.mtp.*",),
    "mellum": (r"^mtp\.",),
    "mimo_v2_flash": (r"^model\.mtp\.",),
    "minimax_m3_vl_text": (r"(^|\.)mtp\..*",),
    "nemotron_h": (r"mtp.*",),
    "olmo_hybrid": (r"^mtp.*",),
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_next": (r"^mtp.*",),
    "qwen4_exp": _QWEN,
    "qwen4_exp_text": _QWEN,
}
"""Regular expressions of the names that transformers ignores, by model type."""
_LAYER = re.compile(r"\A(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")


def ignored_tensors(names: Iterable[str], *, model_type: str, layers: int) -> frozenset[str]:
    """Return those of a checkpoint's tensors that transformers does not read.

    `layers` is the number of the model's layers: a tensor of one of them is always read.
    """
    patterns = IGNORED.get(model_type, ())
    return frozenset(
        name
        for name in names
        if any(re.search(each, name) for each in patterns) and not _is_of_layer(name, layers)
    )


def describe_ignored(ignored: Iterable[str]) -> str | None:
    """Return a line on tensors that are neither trained nor saved, or None without any."""
    found = sorted(ignored)
    if not found:
        return None
    return (
        f"{len(found)} tensors that transformers does not read (first: {found[0]}): not trained "
        "and not in checkpoints"
    )


def _is_of_layer(name: str, layers: int) -> bool:
    found = _LAYER.match(name)
    return found is not None and int(found[1]) < layers
