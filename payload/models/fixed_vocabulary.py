"""Models whose vocabulary cannot grow, because the weights have a table with a row for each token.

The routers of DeepSeek-V4's first layers do not choose the experts of a token. They look them up in
a table of the checkpoint (`tid2eid`), which has no row for a new token.
Source: transformers 5.23, models/deepseek_v4/modeling_deepseek_v4.py, `DeepseekV4HashRouter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = frozenset({"deepseek_v4"})
_HASH = "hash_moe"


def why_fixed_vocabulary(raw: Mapping[str, Any]) -> str | None:
    """Return why the vocabulary of a config.json's model cannot grow, or None if it can."""
    kind = raw.get("model_type")
    if kind not in _TYPES or not _has_table(raw):
        return None
    return (
        f"a model of model_type {kind!r} looks up each token's experts in a table (tid2eid), "
        "which has no row for a new token"
    )


def _has_table(raw: Mapping[str, Any]) -> bool:
    kinds = raw.get("mlp_layer_types")
    if isinstance(kinds, list):
        return _HASH in kinds
    layers = raw.get("num_hash_layers")
    return layers is None or layers != 0
