"""Sizes of some models on the hub, so that a plan needs no network.

These models are in packaged recipes, and a machine may lack their config.json: gated models, and
models for clusters without internet access.
"""

from __future__ import annotations

from collections.abc import Mapping

CONFIGS: Mapping[str, Mapping[str, object]] = {
    # https://huggingface.co/meta-llama/Llama-3.3-70B-Instruct/blob/main/config.json
    "Llama-3.3-70B-Instruct": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    # https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json
    "Qwen3-4B": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
}
"""The config.json of each model, by the last part of its name on the hub."""
