"""The model types whose layers in transformers keep the documents of a packed block apart.

Other layers mix documents: recurrent layers, convolutions, compressed attention, and attention
without masks for documents. A rank measures this on the model itself, before the first packed
block. This list is for decisions without torch. A test compares it with the measurement.
"""

from __future__ import annotations

# fmt: off
SEPARATING_TYPES = frozenset({
    "apertus", "arcee", "aria_text", "axk1", "axk2", "beam", "bitnet", "codegen", "cohere",
    "cohere2", "cohere2_moe", "ctrl", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "diffllama", "doge", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe",
    "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "gptj", "granite",
    "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hrm_text",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "internlm3",
    "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "llama", "llama4_text",
    "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2",
    "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral",
    "modernbert-decoder", "moshi", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe",
    "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
})
# fmt: on
