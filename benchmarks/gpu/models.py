"""Models with random weights for the stages, in the layout of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

STD = 0.02
"""Standard deviation of random matrices; norms are 1."""

_SMALL: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def small_llama(vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a Llama of 4 layers and width 256."""
    return {
        **_SMALL,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
    }


def small_mixture(vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a Qwen3 mixture of 8 experts with 4 layers and width 256."""
    return {
        **_SMALL,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": vocab_size,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a llama, qwen3 or qwen3_moe model by its name."""
    width, vocab_size = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab_size, width)
    for layer in range(config["num_hidden_layers"]):
        parts = {**_attention_shapes(config), **_mlp_shapes(config)}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            parts[norm] = (width,)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Make the folder, and write config.json into it; return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_small(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a small model with weights in fp32; return the folder."""
    generator = np.random.default_rng(1)
    tensors = {
        name: generator.normal(float(len(shape) == 1), STD, shape).astype(np.float32)
        for name, shape in tensor_shapes(config).items()
    }
    write_config(folder, config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _attention_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head_width = config.get("head_dim", width // heads)
    inner, key_value = heads * head_width, config["num_key_value_heads"] * head_width
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (inner, width),
        "self_attn.k_proj": (key_value, width),
        "self_attn.v_proj": (key_value, width),
        "self_attn.o_proj": (width, inner),
    }
    if config["model_type"] != "llama":
        shapes |= {f"self_attn.{name}_norm": (head_width,) for name in "qk"}
    return shapes


def _mlp_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width = config["hidden_size"]
    if config["model_type"] != "qwen3_moe":
        return _gated_shapes("mlp", width, config["intermediate_size"])
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate": (config["num_experts"], width)}
    for expert in range(config["num_experts"]):
        shapes |= _gated_shapes(f"mlp.experts.{expert}", width, config["moe_intermediate_size"])
    return shapes


def _gated_shapes(prefix: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj": (inner, width),
        f"{prefix}.up_proj": (inner, width),
        f"{prefix}.down_proj": (width, inner),
    }
