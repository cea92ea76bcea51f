"""Plans the GGUF file of a model of the Llama family, with llama.cpp's names and values.

A model with features that llama.cpp computes differently is rejected.
Source of the keys: llama.cpp, docs/gguf.md and src/models/<architecture>.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from payload.models.gguf_errors import refuse_export
from payload.models.gguf_plan import GgufPlan
from payload.models.llama import yarn
from payload.models.llama.config import (
    EXPERT_WIDTH,
    DecoderConfig,
    Layer,
    read_decoder_config,
    supported_activation,
)
from payload.models.llama.gguf_names import (
    ADJACENT_PAIRS,
    ARCHITECTURES,
    GEMMA_LARGEST,
    GRANITE_SCALES,
    keys,
    tensor_names,
)
from payload.models.llama.gguf_rope_factors import rope_factors
from payload.models.llama.rope import Rope
from payload.models.llama.type_defaults import GEMMA_LOCAL_THETA

_SMOLLM3_PATTERN = 4
_OLMO3_PATTERN = 4
_QWEN3_HEAD = 128
_GEMMA_PATTERN = 6
_GEMMA_SCALAR = 256.0


def plan_gguf(raw: Mapping[str, Any], *, where: str) -> GgufPlan:
    """Return the contents of a GGUF file for this config.json.

    Raises CheckpointError for features that llama.cpp computes differently.
    """
    config = read_decoder_config(raw, where=where)
    unsupported = config.unsupported(where=where)
    if unsupported:
        refuse_export(where, "architecture", unsupported[0])
    if config.attention_bias or config.mlp_bias:
        refuse_export(where, "attention_bias or mlp_bias", True)
    gate = "gelu_pytorch_tanh" if config.defaults().is_gemma else "silu"
    if supported_activation(config.activation()) != gate:
        refuse_export(where, "hidden_act", config.activation())
    layers = config.layers(where=where)
    if config.defaults().is_gemma:
        return _gemma(config, layers, where=where)
    if ARCHITECTURES[config.model_type] in ("olmo2", "granite"):
        return _plain_heads(config, layers, where=where)
    return _llama_like(config, layers, where=where)


def _llama_like(config: DecoderConfig, layers: tuple[Layer, ...], *, where: str) -> GgufPlan:
    architecture = ARCHITECTURES[config.model_type]
    if architecture == "smollm3":
        _require_smollm3_layers(layers, where=where)
    if architecture == "phi3" and config.width_of_head() * config.num_attention_heads != (
        config.hidden_size
    ):
        refuse_export(where, "head_dim", config.width_of_head())
    mixture = config.mixture()
    if mixture is not None and not mixture.normalises:
        refuse_export(where, "norm_topk_prob", False)
    rope = layers[0].rope
    assert rope is not None, "the first layer of these families has rope"
    if rope.kind == "llama3" and architecture != "llama":
        refuse_export(where, "rope_type", rope.kind)
    if rope.kind == "yarn":
        _require_default_yarn(rope, width=config.width_of_head(), where=where)
    values, notes = _values(config, rope), []
    if mixture is not None:
        own = keys(architecture)
        values[own["num_experts"]] = mixture.experts
        values[own["num_experts_per_tok"]] = mixture.active
        values[own["moe_intermediate_size"]] = mixture.inner
        if mixture.inner != EXPERT_WIDTH:
            notes.append(
                f"transformers assumes experts of width {EXPERT_WIDTH} for a Qwen3 MoE in GGUF: "
                f"pass moe_intermediate_size={mixture.inner} to from_pretrained"
            )
    window = min((layer.window for layer in layers if layer.window), default=None)
    if window is not None and not config.defaults().windows_everywhere:
        refuse_export(where, "use_sliding_window", True)
    if window is not None and window < (config.max_position_embeddings or 0):
        values["context_length"] = window
        notes.append(
            f"GGUF has no sliding window for this model: the file's context is {window} tokens, "
            "for which the window has no effect"
        )
    if rope.kind != "default":
        notes.append("transformers' GGUF reader ignores rope scaling; llama.cpp applies it")
    notes += _phi_notes(rope, width=config.width_of_head())
    if architecture == "qwen3" and config.width_of_head() != _QWEN3_HEAD:
        notes.append(
            f"transformers assumes heads of width {_QWEN3_HEAD} for a Qwen3 in GGUF: pass "
            f"head_dim={config.width_of_head()} to from_pretrained"
        )
    heads = {
        "q_proj.weight": config.num_attention_heads,
        "k_proj.weight": config.num_key_value_heads or 1,
    }
    return GgufPlan(
        architecture=architecture,
        values=values,
        vocab_size=config.vocab_size,
        names=tensor_names(architecture),
        rotated_heads=heads if architecture in ADJACENT_PAIRS else {},
        rope_factors=rope_factors(rope, width=config.width_of_head()),
        notes=tuple(notes),
    )


def _phi_notes(rope: Rope, *, width: int) -> list[str]:
    """Return how llama.cpp and transformers read a LongRoPE and a partial rotary embedding."""
    notes = []
    if rope.kind == "longrope":
        notes.append(
            f"llama.cpp applies LongRoPE's long factors to every text if its context (-c) is above "
            f"{rope.original_context} tokens; transformers applies them to longer texts only"
        )
    elif rope.rotated is not None:
        notes.append(
            "transformers' GGUF reader ignores the partial rotary embedding: pass "
            f"rope_parameters={{'rope_type': 'default', 'rope_theta': {rope.theta:g}, "
            f"'partial_rotary_factor': {rope.rotated / width:g}}} to from_pretrained"
        )
    return notes


def _plain_heads(config: DecoderConfig, layers: tuple[Layer, ...], *, where: str) -> GgufPlan:
    """Plan an OLMo or a Granite; llama.cpp derives the width of a head from the model's width."""
    if config.width_of_head() * config.num_attention_heads != config.hidden_size:
        refuse_export(where, "head_dim", config.width_of_head())
    if layers[0].rope is None:
        refuse_export(where, "position_embedding_type", config.position_embedding_type)
    if config.defaults().has_multipliers:
        plan = _llama_like(config, layers, where=where)
        scales = {key: getattr(config, name) for name, key in GRANITE_SCALES.items()}
        return replace(plan, values={**plan.values, **scales})
    if config.tie_word_embeddings:
        refuse_export(where, "tie_word_embeddings", True)
    windows = [layer.window for layer in layers if layer.window is not None]
    if not windows:
        return _llama_like(config, layers, where=where)
    full = _olmo3_full_layer(layers, where=where)
    plan = _llama_like(config, (full,) * len(layers), where=where)
    return replace(plan, values={**plan.values, "attention.sliding_window": max(windows)})


def _olmo3_full_layer(layers: tuple[Layer, ...], *, where: str) -> Layer:
    """Return a layer without a window.

    llama.cpp fixes the order of the layers, and the rotary embedding of layers with a window.
    Raises CheckpointError if the model differs from this.
    """
    expected = [(i + 1) % _OLMO3_PATTERN == 0 for i in range(len(layers))]
    if [layer.window is None for layer in layers] != expected or not any(expected):
        refuse_export(where, "layer_types", "not exactly every fourth layer full")
    full = next(layer for layer in layers if layer.window is None)
    assert full.rope is not None, "OLMo's layers have rope"
    local = {layer.rope for layer in layers if layer.window is not None}
    if local != {Rope(theta=full.rope.theta)}:
        refuse_export(where, "rope of the layers with a window", "not the base of the full layers")
    return full


def _require_default_yarn(rope: Rope, *, width: int, where: str) -> None:
    """Raise CheckpointError if YaRN's settings differ from the settings that llama.cpp
    hard-codes."""
    ramp = yarn.ramp(
        rope.theta,
        head_dim=width,
        original_context=rope.original_context,
        beta_fast=None,
        beta_slow=None,
        truncate=True,
    )
    if rope.ramp != ramp:
        refuse_export(where, "rope beta_fast, beta_slow or truncate", "not the default")
    factor = yarn.attention_factor(rope.factor, mscale=None, mscale_all_dim=None)
    if not math.isclose(rope.attention_factor, factor, rel_tol=1e-6):
        refuse_export(where, "rope attention_factor", rope.attention_factor)


def _require_smollm3_layers(layers: tuple[Layer, ...], *, where: str) -> None:
    """Raise CheckpointError if the layers without rope differ from the layers that llama.cpp
    hard-codes."""
    expected = [bool((i + 1) % _SMOLLM3_PATTERN) for i in range(len(layers))]
    if [layer.rope is not None for layer in layers] != expected:
        refuse_export(where, "no_rope_layers", "not exactly every fourth layer")


def _gemma(config: DecoderConfig, layers: tuple[Layer, ...], *, where: str) -> GgufPlan:
    """Plan a Gemma 3; llama.cpp hard-codes layer order, local rope base and attention scale."""
    full = [layer for layer in layers if layer.window is None]
    local = [layer for layer in layers if layer.window is not None]
    expected = [(i + 1) % _GEMMA_PATTERN == 0 for i in range(len(layers))]
    if [layer.window is None for layer in layers] != expected:
        refuse_export(where, "layer_types", "not exactly one full layer in six")
    local_ropes = {layer.rope for layer in local}
    if local_ropes - {Rope(theta=GEMMA_LOCAL_THETA)}:
        refuse_export(where, "rope of the layers with a window", "not the base 10,000")
    # llama.cpp chooses the scale by the number of layers.
    is_largest = len(layers) == GEMMA_LARGEST
    width = config.hidden_size // config.num_attention_heads
    if config.query_pre_attn_scalar != (width if is_largest else config.width_of_head()):
        refuse_export(where, "query_pre_attn_scalar", config.query_pre_attn_scalar)
    notes = []
    if config.query_pre_attn_scalar != _GEMMA_SCALAR:
        notes.append(
            f"transformers assumes query_pre_attn_scalar = {_GEMMA_SCALAR:g} for a Gemma 3 in "
            f"GGUF: pass query_pre_attn_scalar={config.query_pre_attn_scalar:g} to "
            "from_pretrained"
        )
    rope = full[0].rope if full else Rope(theta=config.defaults().theta)
    assert rope is not None, "Gemma's layers have rope"
    if rope.kind in ("llama3", "yarn"):
        refuse_export(where, "rope_type", rope.kind)
    if rope.kind != "default":
        notes.append("transformers' GGUF reader ignores rope scaling; llama.cpp applies it")
    values = _values(config, rope)
    values["attention.sliding_window"] = config.sliding_window or 0
    return GgufPlan(
        architecture="gemma3",
        values=values,
        vocab_size=config.vocab_size,
        names=tensor_names("gemma3"),
        norm_shift=1.0,
        notes=tuple(notes),
    )


def _values(config: DecoderConfig, rope: Rope) -> dict[str, int | float | str]:
    width, own = config.width_of_head(), keys(ARCHITECTURES[config.model_type])
    resolved = {
        "max_position_embeddings": config.max_position_embeddings or 0,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": width,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.theta,
    }
    values: dict[str, int | float | str] = {
        **{own[name]: value for name, value in resolved.items()},
        "attention.value_length": width,
        "rope.dimension_count": rope.rotated or width,
        "vocab_size": config.vocab_size,
    }
    if rope.kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope.factor,
            "rope.scaling.original_context_length": rope.original_context,
        }
    if rope.kind == "longrope":
        values |= {
            "rope.scaling.original_context_length": rope.original_context,
            "rope.scaling.attn_factor": rope.attention_factor,
        }
    return values
