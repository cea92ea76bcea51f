"""Small random models of each class: the sizes from which transformers builds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCABULARY = 131

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 8}
_WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
_FOUR_LAYERS = {
    **_HEAD,
    "sliding_window": 9,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LINEAR_ATTENTION = {
    **_HEAD,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One class of models."""

    model_type: str
    sizes: Mapping[str, Any]

    def config(self) -> dict[str, Any]:
        """Return the fields of the class's config."""
        return {"model_type": self.model_type, **self.sizes}


def _case(model_type: str, **more: Any) -> Case:
    return Case(model_type=model_type, sizes={**_SIZES, **more})


CASES: Mapping[str, Case] = {
    "GPT2": Case(
        model_type="gpt2",
        sizes={
            **{"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4, "n_embd": 32},
            **{"n_positions": 128, "bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "Llama": _case("llama"),
    "Llama4, text": _case(
        "llama4_text",
        **{**_HEAD, "intermediate_size_mlp": 48, "num_local_experts": 4},
        attention_chunk_size=64,
    ),
    "Mistral": _case("mistral", sliding_window=9),
    "Ministral3": _case("ministral3", **_HEAD),
    "Mixtral": _case("mixtral", **_LOCAL_EXPERTS),
    "Qwen2": _case("qwen2"),
    "Qwen3": _case("qwen3", **_HEAD),
    "Qwen3Moe": _case("qwen3_moe", **_HEAD, **_EXPERTS),
    "Qwen3_5, text": _case("qwen3_5_text", **_LINEAR_ATTENTION),
    "Qwen3_5Moe, text": _case(
        "qwen3_5_moe_text",
        **{**_LINEAR_ATTENTION, **_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "Qwen3Next": _case(
        "qwen3_next", **{**_LINEAR_ATTENTION, **_EXPERTS, "shared_expert_intermediate_size": 16}
    ),
    "Gemma2": _case("gemma2", **_HEAD, sliding_window=9),
    "Gemma3, text": _case("gemma3_text", **_HEAD, **_WINDOWS, query_pre_attn_scalar=8),
    "Gemma3n, text": _case(
        "gemma3n_text",
        **{**_FOUR_LAYERS, "intermediate_size": [48] * 4},
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
    ),
    "Gemma4, text": _case("gemma4_text", **_FOUR_LAYERS, global_head_dim=16),
    "Phi3": _case("phi3", sliding_window=None),
    "Olmo2": _case("olmo2"),
    "Olmo3": _case("olmo3", **_WINDOWS),
    "OlmoE": _case("olmoe", num_experts=4, num_experts_per_tok=2),
    "Exaone4": _case("exaone4", **_HEAD, **_WINDOWS),
    "Granite": _case(
        "granite",
        logits_scaling=2.0,
        residual_multiplier=0.5,
        embedding_multiplier=2.0,
        attention_multiplier=0.3,
    ),
    "GraniteMoeHybrid": _case(
        "granitemoehybrid",
        **{**_LOCAL_EXPERTS, **_MAMBA, "layer_types": ["mamba", "attention"]},
        shared_intermediate_size=16,
    ),
    "GraniteMoeHybrid, dense": _case(
        "granitemoehybrid",
        **{**_MAMBA, "layer_types": ["attention"] * 2, "shared_intermediate_size": 48},
        num_local_experts=0,
        num_experts_per_tok=0,
    ),
    "GptOss": _case(
        "gpt_oss",
        **{**_HEAD, **_WINDOWS, **_LOCAL_EXPERTS},
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "DeepseekV3": _case(
        "deepseek_v3",
        **{**_HEAD, "num_key_value_heads": 4, "moe_intermediate_size": 16},
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8},
        **{"q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
    # Its first router looks each token's experts up in a table of integers, a part of the weights.
    "DeepseekV4": _case(
        "deepseek_v4",
        **{**_HEAD, "num_key_value_heads": 1, "moe_intermediate_size": 16, "q_lora_rank": 12},
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        **{"num_hash_layers": 1, "compress_ratios": [0, 4, 0], "sliding_window": 9},
        **{"index_head_dim": 8, "index_n_heads": 4, "index_topk": 8, "qk_rope_head_dim": 4},
        **{"o_groups": 2, "o_lora_rank": 16, "hc_mult": 2, "hc_sinkhorn_iters": 2},
    ),
    "GPTNeoX": _case("gpt_neox", rotary_pct=0.5),
    "Falcon": Case(
        model_type="falcon",
        sizes={
            **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "FalconH1": _case("falcon_h1", **_HEAD, **_MAMBA, mamba_d_ssm=64),
    "Cohere2": _case("cohere2", **_HEAD, **_WINDOWS, logit_scale=0.5),
    "LFM2": _case("lfm2", layer_types=["conv", "full_attention"], block_ff_dim=48),
    "SmolLM3": _case("smollm3"),
    "Glm4": _case("glm4", **_HEAD, partial_rotary_factor=0.5),
}
"""Classes by their names in the table."""
