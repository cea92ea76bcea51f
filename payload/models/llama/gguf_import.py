"""Converts llama.cpp's names in a GGUF file to the Llama family's config.json and tensor names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from payload.core.printable_text import shown
from payload.models.gguf_errors import refuse_import
from payload.models.gguf_header import Array, GgufHeader, Value

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3")
"""Architectures as llama.cpp names them; `llama` includes SmolLM2 and Mistral."""
_KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""The name in config.json of each key under the architecture's prefix."""
_READ = frozenset(
    {*_KEYS, "attention.key_length", "attention.value_length", "rope.dimension_count"}
    | {"rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"}
    # These have no effect: the tensors give the vocabulary, and only YaRN uses the last two.
    | {"vocab_size", "tensor_data_layout"}
    | {"rope.scaling.original_context_length", "rope.scaling.finetuned"}
)
"""Keys under the architecture's prefix that can have any value."""
_HEAD_WIDTHS = ("rope.dimension_count", "attention.value_length")
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NEUTRAL: Mapping[str, float] = {"attention.causal": True, "rope.scaling.attn_factor": 1.0}
"""Values with which other keys have no effect; the value is 0 for a key that is not listed."""
_DEFAULTS: Mapping[str, float] = {"rope_theta": 10_000.0}
_SINGLE = (
    *("_token_id", ".add_bos_token", ".add_eos_token", ".add_space_prefix", ".chat_template"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre"),
)
"""Ends of tokenizer keys that must have a single value, although transformers accepts arrays."""
_TOKENS: Mapping[str, str] = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_PARTS: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""The name of each module in llama.cpp."""


def gguf_config(header: GgufHeader, *, where: str) -> dict[str, Any]:
    """Return a config.json for a header with one of `ARCHITECTURES`.

    Raises CheckpointError.
    """
    values = header.values
    kind = str(values["general.architecture"])
    width = _head_width(values, kind)
    _refuse_variants(header, kind, width, where=where)
    found = {name: values.get(f"{kind}.{key}") for key, name in _KEYS.items()}
    config: dict[str, Any] = {key: value for key, value in found.items() if value is not None}
    config = {**_DEFAULTS, **config, "model_type": kind}
    if "token_embd.weight" in header.shapes:
        config["vocab_size"] = header.shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in header.shapes
    if width is not None:
        config["head_dim"] = width
    if kind == "phi3":
        # Not the type's default.
        config.setdefault("pad_token_id", None)
        config["sliding_window"] = values.get("phi3.attention.sliding_window") or None
        rotated = values.get("phi3.rope.dimension_count", width)
        config["partial_rotary_factor"] = _share(rotated, width, where=where)
    config |= {name: values[key] for name, key in _TOKENS.items() if key in values}
    factor = values.get(f"{kind}.rope.scaling.factor", values.get(f"{kind}.rope.scale_linear"))
    # As in llama.cpp: without a type, the scaling is linear. A factor of 0 means no scaling.
    is_linear = values.get(f"{kind}.rope.scaling.type", "linear") == "linear"
    if is_linear and factor not in (None, 0, 1):
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return config


def _head_width(values: Mapping[str, Value], kind: str) -> Value | None:
    """Return the elements of a head; a file of Phi can give only the number of rotated ones."""
    width = values.get(f"{kind}.attention.key_length")
    sizes = [values.get(f"{kind}.{key}") for key in ("embedding_length", "attention.head_count")]
    if width is None and kind == "phi3" and all(isinstance(each, int) for each in sizes):
        columns, heads = cast("list[int]", sizes)
        return columns // heads if heads > 0 else None
    return values.get(f"{kind}.rope.dimension_count") if width is None else width


def _share(rotated: Value | None, width: Value | None, *, where: str) -> float:
    """Return the share of a head that is rotated. Raises CheckpointError."""
    if isinstance(rotated, int) and isinstance(width, int) and 0 < rotated <= width:
        share = rotated / width
        # transformers rounds the product with the width down.
        return share if int(width * share) == rotated else math.nextafter(share, 1)
    refuse_import(where, "phi3.rope.dimension_count", rotated, f"heads are {shown(width)} wide")


def _refuse_variants(header: GgufHeader, kind: str, width: Value | None, *, where: str) -> None:
    """Raise CheckpointError for models that would be read without an error, but incorrectly."""
    values = header.values
    for key, value in values.items():
        if isinstance(value, Array) and (key.startswith(f"{kind}.") or key.endswith(_SINGLE)):
            refuse_import(where, key, value, "must be a single value, not an array")
    for key in _FACTORS:
        if key in header.shapes:
            refuse_import(where, key, "a tensor", "transformers' reader ignores it")
    scaling = values.get(f"{kind}.rope.scaling.type")
    if scaling not in (None, "none", "linear"):
        refuse_import(
            where, f"{kind}.rope.scaling.type", scaling, "transformers' reader ignores it"
        )
    for full, found in values.items():
        key = full.removeprefix(f"{kind}.")
        is_read = key in _READ or (kind == "phi3" and key == "attention.sliding_window")
        if key != full and not is_read and found != _NEUTRAL.get(key, 0):
            refuse_import(where, full, found, "not supported")
    # The rotary embedding of Phi can be partial.
    equal = ("attention.value_length",) if kind == "phi3" else _HEAD_WIDTHS
    for key in equal:
        other = values.get(f"{kind}.{key}")
        if other not in (None, width):
            refuse_import(where, f"{kind}.{key}", other, f"heads are {shown(width)} wide")


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of the tensor that transformers names `name`."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        number, _, part = module.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{_PARTS[part]}.{kind}"
    return f"{_PARTS[module]}.{kind}"
