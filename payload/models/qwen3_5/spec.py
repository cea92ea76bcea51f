"""Sizes and costs of a dense Qwen3.5 text model.

Most layers have linear attention, by a gated delta rule; all others have full attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from payload.models.llama.rope import Rope
from payload.models.qwen3_5.config import MODEL_TYPE, LinearAttention, read_config
from payload.models.spec import (
    PROCESS_BYTES,
    GradientSize,
    LinearSize,
    ModelSpec,
    RankSetting,
)

CHUNK = 64
"""Tokens in a chunk of the gated delta rule."""
_LINEARS = ("_proj.weight", "_qkv.weight", "_z.weight", "_b.weight", "_a.weight")
_NOT_SPLIT = f"the layers of a {MODEL_TYPE} cannot be split over ranks"


def read(raw: Mapping[str, Any], *, where: str) -> Qwen35Spec:
    """Return the spec that a config.json describes. Raises CheckpointError."""
    config = read_config(raw, where=where)
    return Qwen35Spec(
        model_type=raw["model_type"],
        sequence_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        are_full=config.are_full(where=where),
        linear=config.linear_attention(where=where),
        rope=config.rope(where=where),
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        tie_word_embeddings=config.tie_word_embeddings,
        padding=config.pad_token_id,
        initializer_range=config.initializer_range,
        config=dict(raw),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Spec(ModelSpec):
    """The sizes and computation of a dense Qwen3.5 text model."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    are_full: tuple[bool, ...]
    """One value for each layer: True for full attention, False for linear attention."""
    linear: LinearAttention
    rope: Rope
    """The rotary embedding of the layers with full attention."""
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    padding: int | None = None
    """The padding token. Its embedding gets no gradient."""
    initializer_range: float = 0.02
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The config.json that was read; the config.json of a checkpoint is derived from it."""

    def config_read(self) -> Mapping[str, Any]:
        """Return the config.json that was read."""
        return self.config

    def with_vocab_size(self, rows: int) -> Qwen35Spec:
        """Return the same model with `rows` rows in its embedding and output head."""
        return replace(self, vocab_size=rows, config={**self.config, "vocab_size": rows})

    def context(self) -> int:
        """Return the longest context of the weights in tokens."""
        return self.max_position_embeddings

    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self.are_full)

    def num_heads(self) -> int:
        """Return the number of query heads of a layer with full attention."""
        return self.num_attention_heads

    def width(self) -> int:
        """Return the width of the residual stream."""
        return self.hidden_size

    def is_tied(self) -> bool:
        """Return whether the output head is the token embedding."""
        return self.tie_word_embeddings

    def flops_per_token(self) -> int:
        """Return the floating-point operations of forward and backward for one token."""
        attention = sum(self.are_full) * self._query_width() * self.sequence_length
        return 6 * self.matmul_size() + 12 * attention + self.recurrent_flops()

    def recurrent_flops(self) -> int:
        """Return the FLOPs per token of linear attention, without the layers' linears.

        The rule is computed in chunks. Counted are the products of keys and of queries with keys,
        the triangular systems, reading and writing the state, and the sums of the new values. The
        backward pass has twice as many operations.
        """
        linear = self.linear
        keys, values = linear.key_dim, linear.value_dim
        head = 2 * CHUNK * (2 * keys + values) + CHUNK * (keys + values) + 6 * keys * values
        layer = linear.value_heads * head + 2 * linear.taps * linear.mixed()
        return 3 * (self.num_layers() - sum(self.are_full)) * layer

    def memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory, the interpreter and torch included.

        Weights, gradients and two AdamW moments are fp32. Without kernels, autocast keeps bf16
        copies of the forward pass's matrices until the end of the backward pass.
        """
        size = setting.value_bytes()
        tokens = setting.micro_batch_size * self.sequence_length
        copies = self.matmul_size() * 2 if setting.dtype == "bf16" and not setting.kernels else 0
        held = self.num_params() * setting.trained_bytes() + copies + PROCESS_BYTES
        full = sum(self.are_full)
        kept = full * self._full_bytes(size, kernels=setting.kernels)
        kept += (self.num_layers() - full) * self._linear_bytes(size, kernels=setting.kernels)
        kept += self._backward_bytes(size, kernels=setting.kernels)
        return held + tokens * kept + self._logits_bytes(setting)

    def _backward_bytes(self, size: int, *, kernels: bool) -> int:
        """Return the bytes per token that the delta rule's backward pass needs in one layer.

        With kernels, the bytes are the gradients of the tensors that the layer keeps. In the worst
        case, all heads are computed at the same time. Then each head adds a square matrix for each
        chunk, the chunk's state, and two tensors of values. Without kernels, the bytes are about
        six square matrices for each chunk, and seven tensors of keys and of values, in fp32.
        """
        linear = self.linear
        keys, values = linear.key_dim, linear.value_dim
        if kernels:
            head = keys * values // CHUNK + CHUNK + 2 * values
            return self._rule_bytes(size) + size * linear.value_heads * head
        return 4 * linear.value_heads * (6 * CHUNK + 7 * (keys + values))

    def _full_bytes(self, size: int, *, kernels: bool) -> int:
        """Return the bytes of activations for each token that a full-attention layer keeps."""
        queries, keys = self._query_width(), self.num_key_value_heads * self.head_dim
        return self._common_bytes(size, kernels=kernels) + size * (5 * queries + 4 * keys)

    def _linear_bytes(self, size: int, *, kernels: bool) -> int:
        """Return the bytes of activations for each token that a linear-attention layer keeps."""
        linear = self.linear
        if kernels:
            return self._common_bytes(size, kernels=True) + self._rule_bytes(size)
        heads = linear.value_heads * (CHUNK * size + 24)
        expanded = 2 * linear.value_heads * linear.key_dim + linear.values()
        rule = size * (linear.mixed() + expanded + 5 * linear.values())
        return self._common_bytes(size, kernels=False) + rule + heads

    def _rule_bytes(self, size: int) -> int:
        """Return the bytes for each token that the kernels of linear attention keep.

        The kernels keep queries, keys and values before and after the convolution, the gates, and
        the output before and after the gate.
        """
        return size * (2 * self.linear.mixed() + 3 * self.linear.values())

    def _common_bytes(self, size: int, *, kernels: bool) -> int:
        """Return the bytes for each token that the norms and the MLP of a layer keep."""
        width, inner = self.hidden_size, self.intermediate_size
        if kernels:
            return 8 * width + size * (2 * width + 2 * inner)
        return 20 * width + size * (4 * width + 5 * inner)

    def gradient_sizes(self) -> tuple[GradientSize, ...]:
        """Return the parameters in the order in which the backward pass finishes them."""
        layers = [
            GradientSize(math.prod(shape), "matrix" if len(shape) > 1 else "vector")
            for is_full in reversed(self.are_full)
            for _, shape in reversed([*self._layer_shapes(is_full)])
        ]
        sizes = [GradientSize(self.hidden_size, "vector"), *layers]
        if not self.is_tied():
            sizes.insert(0, GradientSize(self.embedding_size(), "head"))
        return (*sizes, GradientSize(self.embedding_size(), "embedding"))

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every parameter, as a checkpoint names and orders them."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for number, is_full in enumerate(self.are_full):
            for name, shape in self._layer_shapes(is_full):
                yield f"model.layers.{number}.{name}", shape
        yield "model.norm.weight", (self.hidden_size,)
        if not self.is_tied():
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def linears(self) -> tuple[LinearSize, ...]:
        """Return the layers' linears in the order of the forward pass."""
        return tuple(
            LinearSize(name.removesuffix(".weight"), inputs=shape[1], outputs=shape[0])
            for name, shape in self.tensor_shapes()
            if name.endswith(_LINEARS)
        )

    def why_not_tensor(self, ranks: int) -> str | None:
        """Return why `ranks` ranks cannot split each layer."""
        del ranks
        return _NOT_SPLIT

    def why_not_stages(self, stages: int) -> str | None:
        """Return why the layers cannot be divided into `stages` stages."""
        del stages
        return _NOT_SPLIT

    def _query_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    def _layer_shapes(self, is_full: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each parameter of a layer."""
        width, inner = self.hidden_size, self.intermediate_size
        yield "input_layernorm.weight", (width,)
        yield from self._full_shapes() if is_full else self._linear_shapes()
        yield "post_attention_layernorm.weight", (width,)
        yield "mlp.gate_proj.weight", (inner, width)
        yield "mlp.up_proj.weight", (inner, width)
        yield "mlp.down_proj.weight", (width, inner)

    def _full_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of the parameters of full attention; queries come with gates."""
        width, queries = self.hidden_size, self._query_width()
        keys = self.num_key_value_heads * self.head_dim
        for name, rows, columns in (
            ("q_proj", 2 * queries, width),
            ("k_proj", keys, width),
            ("v_proj", keys, width),
        ):
            yield from self._projection(name, rows, columns)
        yield "self_attn.q_norm.weight", (self.head_dim,)
        yield "self_attn.k_norm.weight", (self.head_dim,)
        yield from self._projection("o_proj", width, queries)

    def _projection(
        self, name: str, rows: int, columns: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"self_attn.{name}.weight", (rows, columns)
        if self.attention_bias:
            yield f"self_attn.{name}.bias", (rows,)

    def _linear_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of the parameters of linear attention."""
        width, linear = self.hidden_size, self.linear
        yield "linear_attn.dt_bias", (linear.value_heads,)
        yield "linear_attn.A_log", (linear.value_heads,)
        yield "linear_attn.in_proj_qkv.weight", (linear.mixed(), width)
        yield "linear_attn.in_proj_z.weight", (linear.values(), width)
        yield "linear_attn.in_proj_b.weight", (linear.value_heads, width)
        yield "linear_attn.in_proj_a.weight", (linear.value_heads, width)
        yield "linear_attn.conv1d.weight", (linear.mixed(), 1, linear.taps)
        yield "linear_attn.norm.weight", (linear.value_dim,)
        yield "linear_attn.out_proj.weight", (width, linear.values())
