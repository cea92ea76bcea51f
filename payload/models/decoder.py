"""The numbers of a decoder of the Llama family: Llama, SmolLM, Qwen, Mistral, Gemma 3.

One description covers them all: `DecoderSpec` says what each layer does, so that code that builds
or counts a model asks no family's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from payload.errors import CheckpointError
from payload.models.decoder_config import (
    FAMILIES,
    Activation,
    Layer,
    read_decoder_config,
    supported_activation,
)

MODEL_TYPES = (*FAMILIES, "gemma3")


def read(raw: Mapping[str, Any], *, where: str) -> DecoderSpec:
    """Return the spec that a config.json describes. Raises CheckpointError.

    A config whose features are not all supported is read too: see `unsupported`.
    """
    if raw["model_type"] == "gemma3":
        raise CheckpointError(
            f"{where}: model_type = 'gemma3': it holds a vision model beside the text model. Name "
            "a text model (model_type 'gemma3_text', google/gemma-3-270m or -1b for example)."
        )
    config = read_decoder_config(raw, where=where)
    family, head_dim = config.family(), config.width_of_head()
    gemma, kind = family.is_gemma, config.model_type
    biased = config.attention_bias and kind in ("llama", "smollm3", "qwen3", "gemma3_text")
    return DecoderSpec(
        model_type=kind,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        layers=config.layers(where=where),
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings or family.context,
        sequence_length=config.max_position_embeddings or family.context,
        rms_norm_eps=config.rms_norm_eps,
        hidden_act=supported_activation(config.activation()),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=biased or kind == "qwen2",
        output_bias=biased,
        mlp_bias=config.mlp_bias and kind in ("llama", "smollm3"),
        qk_norm=family.qk_norm,
        sandwich_norms=gemma,
        norm_offset=gemma,
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        attention_scale=(config.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        initializer_range=config.initializer_range,
        unsupported_features=config.unsupported(where=where),
        config=dict(raw),
    )


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
            for name, shape in self._layer_shapes(
                queries, self.num_key_value_heads * self.head_dim
            ):
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
        norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
        if self.sandwich_norms:
            norms += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        for name in norms:
            yield f"{name}.weight", (width,)
