"""The multimodal `model_type`s with a text model that can be trained, and where that model is.

Source: transformers 5.23, models/<model_type>/modeling_<model_type>.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Ties = Literal["top", "text", "either", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeType:
    """The place of the text model in a multimodal model of transformers."""

    body: str = "model.language_model."
    """Path of the text model's layers in the whole model; `model.` in the text model alone."""
    head: str = "lm_head"
    """Path of the output head in the whole model; `lm_head` in the text model alone."""
    tied: bool = False
    """The default of tie_word_embeddings at the top of config.json."""
    ties: Ties = "top"
    """Which tie_word_embeddings decides whether the output head is the token embedding: the one at
    the top of config.json or that of text_config, `either` if it is true, or `never` any."""
    tied_key: str | None = None
    """Another name of tie_word_embeddings, which takes precedence at the top of config.json."""
    is_flat: bool = False
    """True if the text model's keys are at the top of config.json, not in text_config."""
    was_flat: bool = False
    """True if config.json of old checkpoints has the text model's keys at its top."""
    text_type: str | None = None
    """The model_type of the text model if config.json does not name it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of the text model's keys that config.json may omit."""
    scales_logits: bool = False
    """True if the whole model's class applies the keys in LOGIT_KEYS."""


WHOLE_TYPES: Mapping[str, WholeType] = {
    "exaone4_5": WholeType(text_type="exaone4"),
    "gemma3": WholeType(tied=True, text_type="gemma3_text"),
    "gemma3n": WholeType(tied=True, text_type="gemma3n_text", scales_logits=True),
    "gemma4": WholeType(tied=True, text_type="gemma4_text", scales_logits=True),
    "idefics3": WholeType(body="model.text_model.", text_type="llama"),
    "internvl": WholeType(tied=True, text_type="qwen2"),
    "lfm2_vl": WholeType(tied=True, tied_key="tie_embedding", text_type="lfm2"),
    "llama4": WholeType(
        body="language_model.model.",
        head="language_model.lm_head",
        ties="text",
        text_type="llama4_text",
    ),
    "llava": WholeType(ties="either", text_type="llama"),
    "llava_next": WholeType(text_type="llama"),
    "llava_onevision": WholeType(ties="either", text_type="qwen2"),
    "mistral3": WholeType(tied=True, text_type="mistral"),
    "phi4_multimodal": WholeType(body="model.", is_flat=True, text_type="phi3"),
    "qwen2_5_vl": WholeType(ties="either", text_type="qwen2_5_vl_text", was_flat=True),
    "qwen2_audio": WholeType(ties="never", text_type="qwen2"),
    "qwen2_vl": WholeType(ties="either", text_type="qwen2_vl_text", was_flat=True),
    "qwen3_5": WholeType(text_type="qwen3_5_text"),
    "qwen3_5_moe": WholeType(text_type="qwen3_5_moe_text"),
    "qwen3_vl": WholeType(text_type="qwen3_vl_text"),
    "smolvlm": WholeType(body="model.text_model.", text_type="llama"),
    "voxtral": WholeType(
        ties="never",
        text_type="llama",
        defaults={
            **{"vocab_size": 131_072, "hidden_size": 3072, "intermediate_size": 8192},
            **{"num_hidden_layers": 30, "num_key_value_heads": 8, "head_dim": 128},
            **{"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e8},
        },
    ),
}
"""The multimodal types, by the model_type of config.json."""


# fmt: off
TIED_TEXT_TYPES = frozenset({
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot",
    "blenderbot-small", "bloom", "camembert", "cohere", "cohere2", "cohere2_moe",
    "cohere_compass_text", "cpmant", "ctrl", "data2vec-text", "electra", "ernie", "ernie4_5",
    "ernie4_5_moe", "falcon", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
    "gemma4_text", "gemma4_unified_assistant", "gemma4_unified_text", "gpt-sw3", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "granite_swa", "jetmoe", "lfm2", "lfm2_moe",
    "lfm3", "mamba", "marian", "mbart", "megatron-bert", "minicpm3", "modernbert-decoder", "mpt",
    "mvp", "openai-gpt", "opt", "pegasus", "plbart", "prophetnet", "recurrent_gemma", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "smollm3", "starcoder2", "trocr",
    "vaultgemma", "whisper", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
    "youtu", "zamba", "zamba2", "zaya",
})
# fmt: on
"""Text types for which tie_word_embeddings is true by default."""
LOGIT_KEYS: Mapping[str, float | None] = {
    "final_logit_softcapping": None,
    "lm_head_multiplier": 1.0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
}
"""Keys of text models that change the logits, each with its neutral value."""
LOGIT_DEFAULTS: Mapping[str, tuple[str, float]] = {
    "cohere": ("logit_scale", 0.0625),
    "cohere2": ("logit_scale", 0.0625),
    "gemma2": ("final_logit_softcapping", 30.0),
    "nanochat": ("final_logit_softcapping", 15.0),
    "vaultgemma": ("final_logit_softcapping", 30.0),
}
"""Text types for which the default of one of these keys changes the logits: the key and the
default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextType:
    """A text model inside a multimodal model; it computes text like `model_type`."""

    model_type: str
    """The model type with the same computation on text."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that config.json may omit and that differ from the defaults of `model_type`."""
    unread: tuple[str, ...] = ()
    """Keys that switch on a feature of `model_type` and that the multimodal model ignores."""


_QWEN2_VL = TextType(
    model_type="qwen2",
    defaults={
        **{"vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568},
        **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        "max_window_layers": 80,
    },
)
TEXT_TYPES: Mapping[str, TextType] = {
    "exaone4_5_text": TextType(model_type="exaone4"),
    "gemma3_text": TextType(
        model_type="gemma3_text",
        defaults={
            **{"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216},
            **{"num_hidden_layers": 26, "num_attention_heads": 8},
        },
    ),
    "phi3": TextType(
        model_type="phi3",
        defaults={
            **{"vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 8192},
            **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
            **{"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "pad_token_id": 199_999},
            **{"bos_token_id": 199_999, "sliding_window": None},
        },
    ),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3_vl_text": TextType(
        model_type="qwen3",
        defaults={
            **{"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016},
            **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
            **{"max_position_embeddings": 128_000, "rope_theta": 5e5, "head_dim": 128},
        },
        unread=("use_sliding_window",),
    ),
}
"""Text models by their model_type in a multimodal config.json. A type that is not listed is used
unchanged.

On text, the three position ids of Qwen-VL (mrope) are equal, so its rotary embedding is Qwen's.
"""
