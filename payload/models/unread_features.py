"""Refuses a config.json with a feature that transformers ignores for the file's model type.

transformers accepts unknown keys without a message, so training would use a different model. Only
features that leave the tensors' shapes unchanged are listed. All other features are found by their
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown

_OFF = (None, False, 0)
_GRANITE = frozenset(
    {"granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid"}
    | {"granitemoeshared", "hyperclovax"}
)
_CAPPED = frozenset({"gemma2", "gemma3_text", "vaultgemma"})
READERS: Mapping[str, frozenset[str]] = {
    "alibi": frozenset({"bloom", "falcon", "mpt"}),
    "use_alibi": frozenset({"falcon"}),
    "parallel_attn": frozenset({"falcon"}),
    "use_parallel_residual": frozenset({"gpt_neox", "stablelm"}),
    "scale_attn_by_inverse_layer_idx": frozenset({"gpt2", "gpt-sw3"}),
    "clip_qkv": frozenset({"dbrx", "iquestcoder", "mpt", "olmo", "olmoe"}),
    "attn_logit_softcapping": _CAPPED,
    "final_logit_softcapping": _CAPPED
    | {"beam", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "inkling2_text", "nanochat"},
    "residual_multiplier": _GRANITE,
    "attention_multiplier": _GRANITE,
    "embedding_multiplier": _GRANITE | {"falcon_h1", "inkling_text"},
    "logits_scaling": _GRANITE | {"minicpm3"},
}
"""For each key that switches on a feature: the model types for which transformers' code reads the
key."""
_NEUTRAL: Mapping[str, float] = {
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Values with which a feature has no effect, in addition to 0, false and null."""
WITHOUT_ROTARY = frozenset(
    {"biogpt", "bloom", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "openai-gpt"}
    | {"opt", "xglm"}
)
"""Model types without a rotary embedding. Files of 2021 have the key `rotary` in a gpt_neo."""


def require_read_features(raw: Mapping[str, Any], *, where: str) -> None:
    """Raise CheckpointError for a feature that transformers ignores; `where` names the file."""
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        return  # The reader of the type refuses the file.
    ignored = [key for key, readers in READERS.items() if kind not in readers]
    if kind in WITHOUT_ROTARY:
        ignored.append("rotary")
    refuse_ignored(raw, ignored, kind=kind, where=where)


def refuse_ignored(raw: Mapping[str, Any], keys: Iterable[str], *, kind: str, where: str) -> None:
    """Raise CheckpointError if one of `keys`, which transformers ignores for `kind`, is on."""
    for key in keys:
        value = raw.get(key)
        if value not in _OFF and value != _NEUTRAL.get(key):
            raise CheckpointError(
                f"{where}: {key} = {shown(value)}: transformers ignores this key for model_type "
                f"{shown(kind)} and would train a different model. Use a copy of the model, "
                "converted to a type with this feature."
            )
