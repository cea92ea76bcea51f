"""Sizes and costs of a dense Gemma 4 text model.

Layers differ in head width, window and MLP. Some layers use the keys and values of an earlier
layer. Small models have a second token embedding (`ple`). Each layer adds a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from payload.models.gemma4.config import MODEL_TYPE, Layer, read_config
from payload.models.spec import (
    PROCESS_BYTES,
    GradientSize,
    LinearSize,
    ModelSpec,
    RankSetting,
    logits_tokens,
)

_LINEARS = ("_proj.weight", "per_layer_input_gate.weight", "_projection.weight")
_NOT_SPLIT = f"the layers of a {MODEL_TYPE} cannot be split over ranks"


def read(raw: Mapping[str, Any], *, where: str) -> Gemma4Spec:
    """Return the spec that a config.json describes. Raises CheckpointError."""
    config = read_config(raw, where=where)
    return Gemma4Spec(
        model_type=raw["model_type"],
        sequence_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        layers=config.layers(where=where),
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        tie_word_embeddings=config.tie_word_embeddings,
        padding=config.pad_token_id,
        logits_cap=config.final_logit_softcapping,
        ple_width=config.hidden_size_per_layer_input or 0,
        ple_rows=config.vocab_size_per_layer_input,
        initializer_range=config.initializer_range,
        config=dict(raw),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Spec(ModelSpec):
    """The sizes and computation of a dense Gemma 4 text model."""

    hidden_size: int
    num_attention_heads: int
    layers: tuple[Layer, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    padding: int | None = 0
    """The padding token. Its embeddings get no gradient."""
    logits_cap: float | None = None
    """A logit x becomes cap * tanh(x / cap); None = the logits stay as they are."""
    ple_width: int = 0
    """Width of each layer's part of the second token embedding; 0 = without this embedding."""
    ple_rows: int = 0
    """Rows of the second token embedding."""
    initializer_range: float = 0.02
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The config.json that was read; the config.json of a checkpoint is derived from it."""

    def config_read(self) -> Mapping[str, Any]:
        """Return the config.json that was read."""
        return self.config

    def with_vocab_size(self, rows: int) -> Gemma4Spec:
        """Return the same model with `rows` rows in its embeddings and output head."""
        changed = {"vocab_size": rows, "vocab_size_per_layer_input": rows}
        return replace(self, vocab_size=rows, ple_rows=rows, config={**self.config, **changed})

    def context(self) -> int:
        """Return the longest context of the weights in tokens."""
        return self.max_position_embeddings

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

        The lookups in both token embeddings need no matmul. Attention is counted in full, also in
        layers with a window.
        """
        heads = self.num_attention_heads
        attention = sum(heads * each.head_dim for each in self.layers) * self.sequence_length
        return 6 * self.matmul_size() + 12 * attention

    def memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory, the interpreter and torch included.

        Weights, gradients and two AdamW moments are fp32. Without kernels, autocast keeps bf16
        copies of the forward pass's matrices until the end of the backward pass.
        """
        size = setting.value_bytes()
        tokens = setting.micro_batch_size * self.sequence_length
        has_kernels = setting.kernels and setting.dtype == "bf16"
        copies = self.matmul_size() * 2 if setting.dtype == "bf16" and not has_kernels else 0
        held = self.num_params() * setting.trained_bytes() + copies + PROCESS_BYTES
        kept = sum(self._kept_bytes(each, size, kernels=has_kernels) for each in self.layers)
        # The second embedding, its projection, the norm of the projection, and their sum.
        kept += self.num_layers() * self.ple_width * 20
        return held + tokens * kept + self._logits_bytes(setting)

    def _kept_bytes(self, layer: Layer, size: int, *, kernels: bool) -> int:
        """Return the bytes for each token that a layer keeps for its backward pass."""
        width, queries = self.hidden_size, self.num_attention_heads * layer.head_dim
        keys = 2 * layer.key_heads * layer.head_dim
        if kernels:
            # The residual stream twice in fp32; the inputs of norms and matmuls.
            inner = 2 * layer.inner + 5 * self.ple_width
            return 8 * width + size * (7 * width + 3 * queries + 2 * keys + inner)
        keys = keys if layer.keys_from is None else 0
        norms = 4 + bool(self.ple_width)
        # A norm keeps its input and its output in fp32. A norm of heads does so, too.
        heads = (queries + keys) * (10 + 4 * size)
        return (
            norms * 10 * width + heads + size * (4 * width + 5 * layer.inner + 3 * self.ple_width)
        )

    def _logits_bytes(self, setting: RankSetting) -> int:
        """Return the bytes of the logits. Capped logits are computed in chunks of tokens."""
        tokens, rows = setting.micro_batch_size * self.sequence_length, self.head_rows()
        if self.logits_cap is None:
            return ModelSpec._logits_bytes(self, setting)
        return min(tokens, logits_tokens(rows)) * rows * 24

    def gradient_sizes(self) -> tuple[GradientSize, ...]:
        """Return the parameters in the order in which the backward pass finishes them."""
        outer = reversed([*self._outer_shapes()])
        layers: list[tuple[int, ...]] = []
        for each in reversed(self.layers):
            layers += [shape for _, shape in reversed([*self._layer_shapes(each)])]
        found = [
            GradientSize(math.prod(shape), "matrix" if len(shape) > 1 else "vector")
            for shape in [(self.hidden_size,), *layers, *(shape for _, shape in outer)]
        ]
        if not self.is_tied():
            found.insert(0, GradientSize(self.embedding_size(), "head"))
        if self.ple_width:
            found.append(GradientSize(self._ple_size(), "embedding"))
        return (*found, GradientSize(self.embedding_size(), "embedding"))

    def outer_elements(self) -> int:
        """Return the number of elements outside the layers."""
        outer = sum(math.prod(shape) for _, shape in self._outer_shapes())
        return ModelSpec.outer_elements(self) + self._ple_size() + outer

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every parameter, as the module orders them.

        A checkpoint also has a scalar for each layer. The scalars are not trained.
        """
        table = (self.vocab_size, self.hidden_size)
        yield "model.embed_tokens.weight", table
        if self.ple_width:
            yield "model.embed_tokens_per_layer.weight", (self.ple_rows, self._ple_columns())
        yield from self._outer_shapes()
        for number, each in enumerate(self.layers):
            for name, shape in self._layer_shapes(each):
                yield f"model.layers.{number}.{name}", shape
        yield "model.norm.weight", (self.hidden_size,)
        if not self.is_tied():
            yield "lm_head.weight", table

    def linears(self) -> tuple[LinearSize, ...]:
        """Return all linears but the head; a linear before the layers reads the embedding."""
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

    def _ple_columns(self) -> int:
        return self.num_layers() * self.ple_width

    def _ple_size(self) -> int:
        return self.ple_rows * self._ple_columns()

    def _outer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of the parameters that project the second embedding."""
        if self.ple_width:
            yield (
                "model.per_layer_model_projection.weight",
                (self._ple_columns(), self.hidden_size),
            )
            yield "model.per_layer_projection_norm.weight", (self.ple_width,)

    def _layer_shapes(self, layer: Layer) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each parameter of a layer."""
        width, head_dim = self.hidden_size, layer.head_dim
        queries, keys = self.num_attention_heads * head_dim, layer.key_heads * head_dim
        yield "input_layernorm.weight", (width,)
        yield from self._projection("q_proj", queries, width)
        if layer.keys_from is None:
            yield from self._projection("k_proj", keys, width)
            if layer.has_values:
                yield from self._projection("v_proj", keys, width)
        yield "self_attn.q_norm.weight", (head_dim,)
        if layer.keys_from is None:
            yield "self_attn.k_norm.weight", (head_dim,)
        yield from self._projection("o_proj", width, queries)
        yield "post_attention_layernorm.weight", (width,)
        yield "pre_feedforward_layernorm.weight", (width,)
        yield "mlp.gate_proj.weight", (layer.inner, width)
        yield "mlp.up_proj.weight", (layer.inner, width)
        yield "mlp.down_proj.weight", (width, layer.inner)
        yield "post_feedforward_layernorm.weight", (width,)
        if self.ple_width:
            yield "per_layer_input_gate.weight", (self.ple_width, width)
            yield "per_layer_projection.weight", (width, self.ple_width)
            yield "post_per_layer_input_norm.weight", (width,)

    def _projection(
        self, name: str, rows: int, columns: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"self_attn.{name}.weight", (rows, columns)
        if self.attention_bias:
            yield f"self_attn.{name}.bias", (rows,)
