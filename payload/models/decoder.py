"""The numbers of a decoder of the Llama family: Llama, SmolLM, Qwen, Mistral, Gemma 3.

One description covers them all: `DecoderSpec` says what each layer does, so that code that builds
or counts a model asks no family's name. `decoder_config` reads it from a config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]
"""Hugging Face's names: SiLU, the exact GELU, and its tanh approximation."""
RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding: its base, and how it is stretched for longer contexts."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    """linear: every position is divided by it. llama3: of the low frequencies."""
    low_freq_factor: float = 1.0
    """llama3 only, like the next two."""
    high_freq_factor: float = 4.0
    original_context: int = 8192
    """Tokens that the frequencies were trained for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What differs between the layers of one model."""

    window: int | None
    """Tokens that a token attends to, itself included; None = all before it."""
    rope: Rope | None
    """None = no positional encoding in this layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder's sizes and arithmetic; names as in Hugging Face's configs where they have one."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    vocab_size: int
    max_position_embeddings: int
    sequence_length: int
    """Tokens of a sequence that it is trained on."""
    rms_norm_eps: float = 1e-6
    hidden_act: Activation = "silu"
    """Of the gate: SwiGLU, or GeGLU with one of the GELUs."""
    tie_word_embeddings: bool = False
    """The head is the token embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head, before the rotary embedding."""
    sandwich_norms: bool = False
    """Gemma: the attention's and the MLP's results are normed too, before they are added."""
    norm_offset: bool = False
    """Gemma: an RMSNorm multiplies by 1 + weight, in fp32; else by weight, in the input's dtype."""
    embedding_scale: float = 1.0
    """Gemma: what the embedded tokens are multiplied by; rounded to the weights' dtype first."""
    attention_scale: float
    """What a query's and a key's dot product is multiplied by."""
    initializer_range: float = 0.02
    unsupported_features: tuple[str, ...] = ()
    """What the config asks for that `train/models/decoder.py` does not compute."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """config.json as it was read; a checkpoint's is made from it."""

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every parameter, as a checkpoint names and orders them."""
        width, queries = self.hidden_size, self.num_attention_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, width)
        for number in range(len(self.layers)):
            for name, shape in self._layer_shapes(queries, self.num_key_value_heads * self.head_dim):
                yield f"model.layers.{number}.{name}", shape
        yield "model.norm.weight", (width,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, width)

    def _layer_shapes(self, queries: int, keys: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, inner = self.hidden_size, self.intermediate_size
        for name, rows, columns, has_bias in (
            ("self_attn.q_proj", queries, width, self.qkv_bias),
            ("self_attn.k_proj", keys, width, self.qkv_bias),
            ("self_attn.v_proj", keys, width, self.qkv_bias),
            ("self_attn.o_proj", width, queries, self.output_bias),
        ):
            yield f"{name}.weight", (rows, columns)
            if has_bias:
                yield f"{name}.bias", (rows,)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        for name, rows, columns in (
            ("mlp.gate_proj", inner, width),
            ("mlp.up_proj", inner, width),
            ("mlp.down_proj", width, inner),
        ):
            yield f"{name}.weight", (rows, columns)
            if self.mlp_bias:
                yield f"{name}.bias", (rows,)
        norms = ("input_layernorm", "post_attention_layernorm")
        if self.sandwich_norms:
            norms += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        for name in norms:
            yield f"{name}.weight", (width,)
