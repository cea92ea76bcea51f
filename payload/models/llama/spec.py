"""Sizes and costs of a decoder of the Llama family: Llama, SmolLM, Qwen, Mistral, Gemma 3, Phi,
OLMo, Granite.

`DecoderSpec` covers all these models: it describes each layer, so code that builds or counts a
model does not depend on the model's type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from payload.models.llama.config import Activation, Layer, read_decoder_config, supported_activation
from payload.models.llama.mixture import Mixture
from payload.models.llama.type_defaults import DEFAULTS, HYBRID
from payload.models.spec import (
    PROCESS_BYTES,
    GradientSize,
    LinearSize,
    ModelSpec,
    ParameterSize,
    RankSetting,
    logits_tokens,
    stages_conflict,
    uneven_split,
)

MODEL_TYPES = tuple(kind for kind in DEFAULTS if kind != HYBRID)


def read(raw: Mapping[str, Any], *, where: str) -> DecoderSpec:
    """Return the spec that a config.json describes. Raises CheckpointError.

    Configs with features that our layers lack are also read; see `unsupported_features`.
    """
    config = read_decoder_config(raw, where=where)
    family, head_dim = config.defaults(), config.width_of_head()
    gemma, kind = family.is_gemma, config.model_type
    biased = config.attention_bias and kind in (
        *("llama", "smollm3", "qwen3", "qwen3_moe", "gemma3_text"),
        *("olmo2", "olmo3", "granite", HYBRID),
    )
    outputs_only, scaled = family.norms_only_outputs, family.has_multipliers
    scale = (config.query_pre_attn_scalar if gemma else head_dim) ** -0.5
    embedding_scale = config.hidden_size**0.5 if gemma else 1.0
    if scaled:
        scale, embedding_scale = config.attention_multiplier, config.embedding_multiplier
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
        mlp_bias=config.mlp_bias and kind in ("llama", "smollm3", "granite"),
        qk_norm=family.qk_norm,
        joint_qk_norm=outputs_only,
        fused_mlp=kind == HYBRID,
        input_norms=not outputs_only,
        output_norms=gemma or outputs_only,
        norm_offset=gemma,
        fused_projections=family.is_phi,
        mixture=config.mixture(),
        embedding_scale=embedding_scale,
        attention_scale=scale,
        residual_scale=config.residual_multiplier if scaled else 1.0,
        logits_divisor=config.logits_scaling if scaled else 1.0,
        initializer_range=config.initializer_range,
        unsupported_features=config.unsupported(where=where),
        config=dict(raw),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """The sizes and computation of a decoder, named as in Hugging Face's configs if possible."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: Activation = "silu"
    """Activation of the gate: SiLU (for SwiGLU), or one of the GELUs (for GeGLU)."""
    tie_word_embeddings: bool = False
    """True if the output head is the token embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    """True if the attention's output projection has a bias."""
    mlp_bias: bool = False
    fused_mlp: bool = False
    """Granite 4: one linear makes gate and up."""
    qk_norm: bool = False
    """True if an RMSNorm is applied to each query and key head, before the rotary embedding."""
    joint_qk_norm: bool = False
    """True if an RMSNorm is applied to all query heads, and one to all key heads, before the rotary
    embedding (OLMo)."""
    input_norms: bool = True
    """True if the inputs of attention and MLP are normed."""
    output_norms: bool = False
    """True if the outputs of attention and MLP are normed before the residual addition (Gemma and
    OLMo)."""
    norm_offset: bool = False
    """If True (Gemma), an RMSNorm multiplies by 1 + weight, in fp32. If False, it multiplies by
    weight, in the input's dtype."""
    fused_projections: bool = False
    """True if one linear makes queries, keys and values, and another one gate and up."""
    mixture: Mixture | None = None
    """The experts of every layer's MLP; None = a plain MLP."""
    embedding_scale: float = 1.0
    """Factor by which the token embeddings are multiplied, in Gemma and Granite."""
    residual_scale: float = 1.0
    """Granite: factor of the outputs of attention and MLP in the residual addition."""
    logits_divisor: float = 1.0
    """Granite: the logits are divided by this number."""
    attention_scale: float
    """Factor by which the dot product of query and key is multiplied."""
    initializer_range: float = 0.02
    unsupported_features: tuple[str, ...] = ()
    """Features in the config that `train/families/llama` lacks."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The config.json that was read; the config.json of a checkpoint is derived from it."""

    def config_read(self) -> Mapping[str, Any]:
        """Return the config.json that was read."""
        return self.config

    def with_vocab_size(self, rows: int) -> DecoderSpec:
        """Return the same model with `rows` rows in its embedding and output head."""
        return replace(self, vocab_size=rows, config={**self.config, "vocab_size": rows})

    def context(self) -> int:
        """Return the longest context, in tokens, that the weights support."""
        return self.max_position_embeddings

    def rope_switch(self) -> int | None:
        """Return the context in pre-training if longer texts have LongRoPE's long factors."""
        ropes = (layer.rope for layer in self.layers if layer.rope is not None)
        found = (each.original_context for each in ropes if each.kind == "longrope")
        return min(found, default=None)

    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    def num_heads(self) -> int:
        """Return the number of query heads of a layer."""
        return self.num_attention_heads

    def width(self) -> int:
        """Return the width of the residual stream."""
        return self.hidden_size

    def is_tied(self) -> bool:
        """Return whether the output head is the token embedding."""
        return self.tie_word_embeddings

    def flops_per_token(self) -> int:
        """Return the floating-point operations of forward and backward for one token.

        Every matrix has one matmul; the lookup of token embeddings needs no matmul. Grouped-query
        attention shares keys but not matmuls, so the query heads are counted.
        """
        layer = sum(math.prod(shape) for _, shape in self._layer_shapes() if len(shape) == 2)
        if self.mixture is not None:
            # The router is a matrix, which the sum includes.
            router = self.mixture.experts * self.hidden_size
            layer += self.mixture.active_params(self.hidden_size) - router
        multiplying = self.num_layers() * layer + self.embedding_size()
        attention = self.num_layers() * self._query_width() * self.sequence_length
        return 6 * multiplying + 12 * attention

    def memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory, the interpreter and torch included.

        The peak is at the end of the forward pass or, with few tokens, at the end of the backward
        pass. Weights and two AdamW moments are fp32, 12 bytes per parameter. Gradients take 4 more
        bytes, or 2 (see `bf16_gradients`). They exist at the end of the forward pass if there are
        other ranks, and in every micro-batch of a step after the first (`accumulates`). With
        `kernels`, each matmul converts its weights to bf16; the head keeps a bf16 copy if its
        logits are computed in chunks. With up to `hidden_size` tokens, a bf16 gradient of the head
        reuses the logits' memory. In bf16, fragmentation took 2 bytes per parameter of the layers,
        or 1 with bf16 gradients, as measured for SmolLM2-135M and Qwen3-0.6B.
        """
        size = setting.value_bytes()
        tokens = setting.micro_batch_size * self.sequence_length
        linears_rounded, head_rounded = self.bf16_gradients(setting)
        head_gradient = self.embedding_size() * (2 if head_rounded else 4)
        embeddings = self.embedding_size() * (1 if self.is_tied() else 2)
        inner = self.num_params() - embeddings
        gradients = inner * (2 if linears_rounded else 4)
        gradients += head_gradient + (embeddings - self.embedding_size()) * 4
        held = self.num_params() * setting.held_bytes() + PROCESS_BYTES
        if setting.accumulates or not setting.alone:
            held, gradients = held + gradients, 0
        has_layers = self._has_fast_layers(setting)
        layers = tokens * self.num_layers() * self._kept_bytes(size, kernels=has_layers)
        if has_layers and setting.dtype == "fp32":
            layers += layers // 10  # temporary tensors, as measured for SmolLM2-135M
        if not setting.kernels:
            logits = setting.plain_logits_bytes(self.vocab_size, tokens=tokens)
            logits += setting.chunked_head_bytes(self.embedding_size())
            return held + max(layers + logits, gradients)
        logits = min(tokens, logits_tokens(self.vocab_size)) * self.vocab_size * size
        head = head_gradient if setting.alone or setting.accumulates else 0
        if setting.dtype == "bf16" and tokens > logits_tokens(self.vocab_size):
            head += self.embedding_size() * 2
        if head_rounded and tokens <= self.hidden_size:
            # The gradient reuses the logits' memory.
            head = 0
        gaps = inner * (1 if linears_rounded else 2) if setting.dtype == "bf16" else 0
        return held + gaps + max(layers + logits + head, gradients)

    def bf16_gradients(self, setting: RankSetting) -> tuple[bool, bool]:
        """Return whether the gradients of the layers' linears, and of the head, are in bf16.

        The head's logits are computed in chunks of tokens. With more than one chunk, the head's
        gradient is a sum in fp32. The two gradients of a tied embedding are summed, then rounded.
        """
        linears = self._has_fast_layers(setting) and setting.alone and not setting.accumulates
        linears = linears and self.mixture is None and setting.dtype == "bf16"
        tokens = setting.micro_batch_size * self.sequence_length
        head = linears and tokens <= logits_tokens(self.vocab_size)
        of_linears, of_head = setting.keeps_bf16_gradients
        return linears and of_linears, head and of_head

    def _has_fast_layers(self, setting: RankSetting) -> bool:
        """Return whether kernels run the layers; they never run transformers' layers."""
        return setting.kernels and not self.unsupported_features

    def _kept_bytes(self, size: int, *, kernels: bool) -> int:
        """Return the bytes for each token that a layer keeps for its backward pass.

        `size` is the number of bytes of an element between the matmuls.
        """
        width, queries, keys = self.hidden_size, self._query_width(), self._key_width()
        if self.mixture is not None:
            # The kernels of the experts are for bf16 alone.
            fast_experts = kernels and size == 2
            experts = size * self.mixture.kept_elements(width, kernels=fast_experts)
            dense = replace(self, mixture=None, intermediate_size=0)
            return dense._kept_bytes(size, kernels=kernels) + experts
        if kernels:
            # A layer keeps the residual stream twice in fp32 and twice normed; queries, keys and
            # values; the attention's output; the gate and up projections.
            return 8 * width + size * 2 * (width + queries + keys + self.intermediate_size)
        # In plain torch, a norm keeps its input and the normed input in fp32, 8 bytes an element.
        # Measured with autograd's hooks for saved tensors, for Llama, Qwen3 and Gemma 3.
        norms = 2 * (self.input_norms + self.output_norms) * width
        if self.qk_norm or self.joint_qk_norm:
            norms += queries + keys
        linears = size * (3 * queries + 2 * keys + 4 * self.intermediate_size)
        return 8 * norms + (10 if size == 2 else 8) * width + linears

    def gradient_sizes(self) -> tuple[GradientSize, ...]:
        """Return the parameters in the order in which the backward pass finishes them."""
        found = [
            GradientSize(math.prod(shape), "matrix" if len(shape) > 1 else "vector")
            for _, shape in reversed([*self._layer_shapes()])
        ]
        sizes = [GradientSize(self.hidden_size, "vector"), *found * self.num_layers()]
        if not self.is_tied():
            sizes.insert(0, GradientSize(self.embedding_size(), "head"))
        return (*sizes, GradientSize(self.embedding_size(), "embedding"))

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every parameter, as a checkpoint names and orders them."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for number in range(self.num_layers()):
            for name, shape in self._layer_shapes(stored=True):
                yield f"model.layers.{number}.{name}", shape
        yield "model.norm.weight", (self.hidden_size,)
        if not self.is_tied():
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def why_not_tensor(self, ranks: int) -> str | None:
        """Return why `ranks` ranks cannot split each layer, or None if they can."""
        if self.unsupported_features:
            return ModelSpec.why_not_tensor(self, ranks)
        if self.mixture is not None:
            return "its experts cannot be split over ranks"
        if self.joint_qk_norm:
            return "its norms of queries and keys span all heads"
        counts = {
            "attention heads": self.num_attention_heads,
            "key and value heads": self.num_key_value_heads,
            "MLP columns": self.intermediate_size,
        }
        return uneven_split(counts, ranks)

    def why_not_stages(self, stages: int) -> str | None:
        """Return why the layers cannot be divided into `stages` stages, or None if they can."""
        if self.unsupported_features:
            return ModelSpec.why_not_stages(self, stages)
        if self.mixture is not None:
            return "the balancing loss of its routers needs all layers on one rank"
        return stages_conflict(self, stages)

    def linears(self) -> tuple[LinearSize, ...]:
        """Return the layers' linears in the order of the forward pass."""
        return tuple(
            LinearSize(name.removesuffix(".weight"), inputs=shape[1], outputs=shape[0])
            for name, shape in self.tensor_shapes()
            if name.endswith(("_proj.weight", "_linear.weight")) and ".experts." not in name
        )

    def parameters_beside_linears(self) -> tuple[ParameterSize, ...]:
        """Return the routers and the stacks of experts, which an adapter can target."""
        if self.mixture is None:
            return ()
        parts = self.mixture.parameters(self.hidden_size)
        return tuple(
            replace(part, name=f"model.layers.{number}.{part.name}")
            for number in range(self.num_layers())
            for part in parts
        )

    def expert_params(self) -> int:
        """Return the number of weights in the experts."""
        layer = 0 if self.mixture is None else self.mixture.expert_params(self.hidden_size)
        return self.num_layers() * layer

    def matmul_size(self) -> int:
        """Return the number of weights in each token's matmuls; only active experts count."""
        layer = 0 if self.mixture is None else self.mixture.active_params(self.hidden_size)
        return ModelSpec.matmul_size(self) + self.num_layers() * layer

    def why_not_quantized(self) -> str | None:
        """Return why the layers' linears cannot have 4 bits, or None if they can."""
        return None if self.mixture is None else "its experts are no linears"

    def _layer_shapes(self, *, stored: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each parameter of a layer, or of its tensors in a checkpoint."""
        width, queries, keys = self.hidden_size, self._query_width(), self._key_width()
        if self.input_norms:
            yield "input_layernorm.weight", (width,)
        if self.fused_projections:
            yield from _linear("self_attn.qkv_proj", queries + 2 * keys, width, bias=self.qkv_bias)
        else:
            yield from _linear("self_attn.q_proj", queries, width, bias=self.qkv_bias)
            yield from _linear("self_attn.k_proj", keys, width, bias=self.qkv_bias)
            yield from _linear("self_attn.v_proj", keys, width, bias=self.qkv_bias)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        if self.joint_qk_norm:
            yield "self_attn.q_norm.weight", (queries,)
            yield "self_attn.k_norm.weight", (keys,)
        yield from _linear("self_attn.o_proj", width, queries, bias=self.output_bias)
        yield "post_attention_layernorm.weight", (width,)
        if self.input_norms and self.output_norms:
            yield "pre_feedforward_layernorm.weight", (width,)
        inner = self.intermediate_size
        if self.mixture is not None:
            shapes = self.mixture.stored_shapes if stored else self.mixture.shapes
            yield from shapes(width)
            return
        if self.fused_mlp:
            yield from _linear("shared_mlp.input_linear", 2 * inner, width, bias=False)
            yield from _linear("shared_mlp.output_linear", width, inner, bias=False)
        else:
            if self.fused_projections:
                yield from _linear("mlp.gate_up_proj", 2 * inner, width, bias=self.mlp_bias)
            else:
                yield from _linear("mlp.gate_proj", inner, width, bias=self.mlp_bias)
                yield from _linear("mlp.up_proj", inner, width, bias=self.mlp_bias)
            yield from _linear("mlp.down_proj", width, inner, bias=self.mlp_bias)
        if self.output_norms:
            yield "post_feedforward_layernorm.weight", (width,)

    def _query_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    def _key_width(self) -> int:
        return self.num_key_value_heads * self.head_dim


def _linear(
    name: str, rows: int, columns: int, *, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)
