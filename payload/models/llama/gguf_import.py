"""Converts the metadata of a GGUF file to the Llama family's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from payload.core.printable_text import shown
from payload.models.gguf_errors import refuse_import, require_single_values
from payload.models.gguf_header import Array, GgufHeader, Value
from payload.models.llama import gguf_rope_import
from payload.models.llama.gguf_names import ARCHITECTURES, GEMMA_LARGEST, GRANITE_SCALES, keys
from payload.models.llama.type_defaults import DEFAULTS, GEMMA_LOCAL_THETA, TypeDefaults

_EQUAL_WIDTHS = ("attention.value_length", "rope.dimension_count")
_FILLED_BY_HEADS = ("phi3", "olmo2", "granite")
"""Architectures in which all heads together have the model's width."""
# The tensors give the vocabulary, and the layout of the data has no effect.
_UNUSED = frozenset({"vocab_size", "tensor_data_layout"})
_KEY_HEADS = "attention.head_count_kv"
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_SOFTMAX = 1
"""llama.cpp's code for softmax as the function that computes the experts' weights."""


def gguf_config(header: GgufHeader, *, where: str) -> dict[str, Any]:
    """Return a config.json for a header with an architecture of the family.

    Raises CheckpointError.
    """
    kind = str(header.values["general.architecture"])
    values = header.of_architecture(kind)
    model_type = _model_type(kind, values)
    values = _with_numbers(values, DEFAULTS[model_type])
    require_single_values(header, values, kind, where=where)
    config: dict[str, Any] = {
        name: values[key] for name, key in keys(kind).items() if key in values
    }
    config = {"rope_theta": 10_000.0, **config, "model_type": model_type}
    if "token_embd.weight" in header.shapes:
        config["vocab_size"] = header.shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in header.shapes
    if DEFAULTS[model_type].padding is not None:
        config["pad_token_id"] = None
    config |= header.tokens()
    config |= _heads(values, config, kind, where=where)
    config |= _in_code(config, kind)
    _require_known(values, config, kind, where=where)
    scaling = gguf_rope_import.rope_scaling(
        values, header.rope_factors, config, kind=kind, where=where
    )
    return config | scaling


def _model_type(kind: str, values: Mapping[str, Value]) -> str:
    """Return the `model_type` of config.json for an architecture of llama.cpp."""
    if kind == ARCHITECTURES["olmo3"] and values.get(_WINDOW):
        return "olmo3"
    return next(name for name, architecture in ARCHITECTURES.items() if architecture == kind)


def _with_numbers(values: Mapping[str, Value], defaults: TypeDefaults) -> dict[str, Value]:
    """Return the values; an array with the same number for all layers becomes that number."""
    found = dict(values)
    heads, pattern, every = values.get(_KEY_HEADS), values.get(_PATTERN), defaults.full_layer_every
    if isinstance(heads, Array) and len(set(heads.items)) == 1:
        found[_KEY_HEADS] = heads.items[0]
    if isinstance(pattern, Array) and every and pattern.items:
        slides = tuple(bool((i + 1) % every) for i in range(pattern.length))
        if pattern.items == slides and pattern.length == values.get("block_count"):
            found[_PATTERN] = every
    return found


def _heads(
    values: Mapping[str, Value], config: Mapping[str, Any], kind: str, *, where: str
) -> dict[str, Any]:
    """Return the width of a head, and for Phi the share that is rotated.

    Raises CheckpointError for heads that llama.cpp does not support.
    """
    is_partial, derived = kind == "phi3", _ratio(config, "hidden_size", "num_attention_heads")
    rotated = values.get("rope.dimension_count")
    width = config.get("head_dim", derived if is_partial else rotated)
    if width is None:
        return {}
    for key in _EQUAL_WIDTHS if not is_partial else _EQUAL_WIDTHS[:1]:
        if values.get(key) not in (None, width):
            refuse_import(where, f"{kind}.{key}", values[key], f"heads are {shown(width)} wide")
    if kind in _FILLED_BY_HEADS and width != derived:
        problem = "llama.cpp derives the width of a head"
        refuse_import(where, f"{kind}.attention.key_length", width, problem)
    if not is_partial:
        return {"head_dim": width}
    share = _share(width if rotated is None else rotated, width, where=where)
    return {"head_dim": width, "partial_rotary_factor": share}


def _ratio(config: Mapping[str, Any], name: str, divisor: str) -> int | None:
    """Return the quotient of two values of config.json, or None if one of them is not a size."""
    first, second = config.get(name), config.get(divisor)
    if isinstance(first, int) and isinstance(second, int) and second > 0:
        return first // second
    return None


def _share(rotated: Value, width: Value, *, where: str) -> float:
    """Return the share of a head that is rotated. Raises CheckpointError."""
    if isinstance(rotated, int) and isinstance(width, int) and 0 < rotated <= width:
        share = rotated / width
        # transformers rounds the product with the width down.
        return share if int(width * share) == rotated else math.nextafter(share, 1)
    refuse_import(where, "phi3.rope.dimension_count", rotated, f"heads are {shown(width)} wide")


def _in_code(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the keys of config.json whose values llama.cpp hard-codes or derives."""
    width = config.get("head_dim") or _ratio(config, "hidden_size", "num_attention_heads")
    if kind == "phi3":
        return {"sliding_window": config.get("sliding_window") or None}
    if kind == "gemma3":
        is_largest = config.get("num_hidden_layers") == GEMMA_LARGEST
        shared = _ratio(config, "hidden_size", "num_attention_heads")
        return {"query_pre_attn_scalar": shared if is_largest else width}
    if kind == "qwen3moe":
        inner = _ratio(config, "intermediate_size", "num_experts_per_tok")
        inner = config.get("moe_intermediate_size") or inner
        return {"norm_topk_prob": True, "moe_intermediate_size": inner}
    if kind == "granite":
        # llama.cpp ignores a factor of 0, and then scales attention by the width of a head.
        scale = float(width) ** -0.5 if width else None
        defaults = {name: 1.0 for name in GRANITE_SCALES} | {"attention_multiplier": scale}
        return {name: config.get(name) or default for name, default in defaults.items()}
    return {}


def _require_known(
    values: Mapping[str, Value], config: Mapping[str, Any], kind: str, *, where: str
) -> None:
    """Raise CheckpointError for models that would be read without an error, but incorrectly."""
    accepted: dict[str, tuple[object, ...]] = {"attention.causal": (True,)}
    every = DEFAULTS[config["model_type"]].full_layer_every
    if every:
        accepted[_PATTERN] = (every,)
    if kind == "gemma3":
        accepted["rope.freq_base_swa"] = (GEMMA_LOCAL_THETA,)
        if not values.get(_WINDOW):
            refuse_import(where, f"{kind}.{_WINDOW}", values.get(_WINDOW), "must be positive")
    if kind == "olmo2":
        accepted["rope.freq_base_swa"] = (config["rope_theta"],)
    if kind == "qwen3moe":
        accepted["expert_gating_func"] = (0, _SOFTMAX)
    if kind == "granite":
        # llama.cpp's converter writes these for a Granite 4 without experts and Mamba layers.
        accepted["expert_shared_feed_forward_length"] = (0, config.get("intermediate_size"))
        accepted |= {key: (value,) for key, value in values.items() if key.startswith("ssm.")}
        accepted["rope.scaling.finetuned"] = (True,)
    known = {*keys(kind).values(), *gguf_rope_import.KEYS, *_EQUAL_WIDTHS, *_UNUSED} - {*accepted}
    for key, value in values.items():
        if key not in known and value not in accepted.get(key, (0,)):
            refuse_import(where, f"{kind}.{key}", value, "not supported")
