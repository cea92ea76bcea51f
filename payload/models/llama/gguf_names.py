"""llama.cpp's names of the Llama family's architectures, metadata keys and tensors.

Export and import use the same tables. Source: llama.cpp, docs/gguf.md and
src/models/<architecture>.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

from payload.models.llama.type_defaults import HYBRID

ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "qwen3_moe": "qwen3moe",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "granite": "granite",
    HYBRID: "granite",
}
"""The architecture in llama.cpp for each `model_type`. A file is read as the first `model_type`
with its architecture, and as an OLMo 3 if it has a sliding window."""

GRANITE_SCALES: Mapping[str, str] = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
GEMMA_LARGEST = 62
"""Number of layers of Gemma 3 27B, for which llama.cpp has another attention scale."""
_KEYS: Mapping[str, str] = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_OWN_KEYS: Mapping[str, Mapping[str, str]] = {
    "gemma3": {"sliding_window": "attention.sliding_window"},
    "olmo2": {"sliding_window": "attention.sliding_window"},
    "phi3": {"sliding_window": "attention.sliding_window"},
    "qwen3moe": {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
    "granite": GRANITE_SCALES,
}

_TENSORS: Mapping[str, tuple[str, ...]] = {
    "model.embed_tokens": ("token_embd",),
    "model.norm": ("output_norm",),
    "lm_head": ("output",),
    "input_layernorm": ("attn_norm",),
    "post_attention_layernorm": ("ffn_norm",),
    "self_attn.q_proj": ("attn_q",),
    "self_attn.k_proj": ("attn_k",),
    "self_attn.v_proj": ("attn_v",),
    "self_attn.o_proj": ("attn_output",),
    "self_attn.q_norm": ("attn_q_norm",),
    "self_attn.k_norm": ("attn_k_norm",),
    "mlp.gate_proj": ("ffn_gate",),
    "mlp.up_proj": ("ffn_up",),
    "mlp.down_proj": ("ffn_down",),
}
_OUTPUT_NORMS: Mapping[str, tuple[str, ...]] = {
    "post_attention_layernorm": ("post_attention_norm",),
    "post_feedforward_layernorm": ("post_ffw_norm",),
}
_OWN_TENSORS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gemma3": {**_OUTPUT_NORMS, "pre_feedforward_layernorm": ("ffn_norm",)},
    "olmo2": _OUTPUT_NORMS,
    "phi3": {"self_attn.qkv_proj": ("attn_qkv",), "mlp.gate_up_proj": ("ffn_up",)},
    "qwen3moe": {
        "mlp.gate": ("ffn_gate_inp",),
        "mlp.experts.gate_proj": ("ffn_gate_exps",),
        "mlp.experts.up_proj": ("ffn_up_exps",),
        "mlp.experts.down_proj": ("ffn_down_exps",),
    },
    "granite": {
        "shared_mlp.input_linear": ("ffn_gate", "ffn_up"),
        "shared_mlp.output_linear": ("ffn_down",),
    },
}
"""Tensor names of single architectures. A file of a Granite 4 has the names of a Granite 3."""

ADJACENT_PAIRS = frozenset({"llama", "smollm3", "granite"})
"""Architectures for which a file stores the two rows of a rotary pair next to each other."""


def keys(architecture: str) -> dict[str, str]:
    """Return the metadata key, without the architecture's prefix, for each key of config.json."""
    return {**_KEYS, **_OWN_KEYS.get(architecture, {})}


def tensor_names(architecture: str) -> dict[str, tuple[str, ...]]:
    """Return the names that each module has in the file, without the layer's prefix."""
    return {**_TENSORS, **_OWN_TENSORS.get(architecture, {})}
