"""Reads the scaling of the rotary embedding from a GGUF file of the Llama family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from payload.models.gguf_errors import refuse_import
from payload.models.gguf_header import Value
from payload.models.llama import yarn
from payload.models.llama.gguf_rope_factors import LLAMA3, LONG, SHORT, llama3_factors
from payload.models.llama.rope import Rope

_TYPE, _FACTOR, _OLD_FACTOR = "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"
_ORIGINAL, _ATTENTION = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
_YARN_ATTENTION = "rope.scaling.yarn_attn_factor"
_YARN: Mapping[str, float] = {
    "rope.scaling.yarn_beta_fast": yarn.FAST,
    "rope.scaling.yarn_beta_slow": yarn.SLOW,
}
"""Keys of YaRN's ramp, with their defaults."""
KEYS = frozenset(
    {_TYPE, _FACTOR, _OLD_FACTOR, _ORIGINAL, _ATTENTION, _YARN_ATTENTION, *_YARN}
    # This has no effect.
    | {"rope.scaling.finetuned"}
)
"""The keys that `rope_scaling` reads, without the architecture's prefix."""
_WITHOUT_YARN = ("phi3", "gemma3")
_LLAMA3_CONTEXTS = (8192, *(2**power for power in range(4, 21)))
"""Contexts in pre-training that are tried, because a file has only the divisors."""
_RELATIVE_ERROR = 1e-5


def rope_scaling(
    values: Mapping[str, Value],
    factors: Mapping[str, tuple[float, ...]],
    config: Mapping[str, Any],
    *,
    kind: str,
    where: str,
) -> dict[str, Any]:
    """Return the keys of config.json with the scaling; `kind` is the architecture.

    `values` are the architecture's metadata without the prefix. `factors` are the tensors that
    contain divisors of the frequencies. Raises CheckpointError for a scaling that the model type
    does not have.
    """
    scaling, factor = values.get(_TYPE, "linear"), values.get(_FACTOR, values.get(_OLD_FACTOR))
    if {LONG, SHORT} <= {*factors} and kind == "phi3":
        return _longrope(values, factors, config, where=where)
    for key in (_ATTENTION, *(() if scaling == "yarn" else (_YARN_ATTENTION,))):
        if values.get(key, 1) != 1:
            refuse_import(where, f"{kind}.{key}", values[key], "not supported")
    if LLAMA3 in factors and kind == "llama":
        return _llama3(factors[LLAMA3], config, where=where)
    for name in factors:
        refuse_import(where, name, "a tensor", f"not supported for {kind}")
    if scaling == "yarn" and kind not in _WITHOUT_YARN:
        return _yarn(values, factor, kind=kind, where=where)
    if scaling not in ("none", "linear"):
        refuse_import(where, f"{kind}.{_TYPE}", scaling, f"not supported for {kind}")
    # As in llama.cpp: without a type, the scaling is linear. A factor of 0 means no scaling.
    if scaling == "none" or factor in (None, 0, 1):
        return {}
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}}


def _yarn(
    values: Mapping[str, Value], factor: Value | None, *, kind: str, where: str
) -> dict[str, Any]:
    if not isinstance(factor, int | float) or factor <= 0:
        refuse_import(where, f"{kind}.{_FACTOR}", factor, "must be positive for yarn")
    # llama.cpp computes this number itself.
    attention = yarn.attention_factor(factor, mscale=None, mscale_all_dim=None)
    given = values.get(_YARN_ATTENTION, attention)
    if not isinstance(given, int | float) or not math.isclose(given, attention, rel_tol=1e-5):
        refuse_import(where, f"{kind}.{_YARN_ATTENTION}", given, f"must be {attention:g}")
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if _ORIGINAL in values:
        found["original_max_position_embeddings"] = values[_ORIGINAL]
    for key, default in _YARN.items():
        if values.get(key, default) != default:
            refuse_import(where, f"{kind}.{key}", values[key], f"must be {default:g}")
    return {"rope_scaling": found}


def _longrope(
    values: Mapping[str, Value],
    factors: Mapping[str, tuple[float, ...]],
    config: Mapping[str, Any],
    *,
    where: str,
) -> dict[str, Any]:
    """Return Phi's LongRoPE."""
    if values.get(_TYPE, "longrope") not in ("longrope", "none", "linear"):
        refuse_import(where, f"phi3.{_TYPE}", values[_TYPE], "has LongRoPE's tensors")
    original = values.get(_ORIGINAL, config.get("max_position_embeddings"))
    return {
        "original_max_position_embeddings": original,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": list(factors[SHORT]),
            "long_factor": list(factors[LONG]),
            "attention_factor": values.get(_ATTENTION, 1.0),
        },
    }


def _llama3(factors: tuple[float, ...], config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the settings of Llama 3's scaling that give these divisors."""
    if set(factors) == {1.0}:
        return {}
    theta, problem = config["rope_theta"], "its divisors are not those of Llama 3's scaling"
    is_possible = all(0 < each < math.inf for each in factors)
    if not isinstance(theta, int | float) or not theta > 0 or not is_possible:
        refuse_import(where, LLAMA3, "a tensor", problem)
    for context in _LLAMA3_CONTEXTS:
        rope = Rope(
            theta=float(theta),
            kind="llama3",
            factor=max(factors),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_context=context,
        )
        expected = llama3_factors(rope, width=2 * len(factors))
        pairs = zip(factors, expected, strict=True)
        if all(math.isclose(*pair, rel_tol=_RELATIVE_ERROR) for pair in pairs):
            return {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": rope.factor,
                    "low_freq_factor": rope.low_freq_factor,
                    "high_freq_factor": rope.high_freq_factor,
                    "original_max_position_embeddings": context,
                }
            }
    refuse_import(where, LLAMA3, "a tensor", problem)
