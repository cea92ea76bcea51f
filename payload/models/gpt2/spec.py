"""Sizes and costs of GPT-2: parameters, FLOPs, bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.core.validation.records import build
from payload.formats.hf_folder import FIX
from payload.models.spec import (
    PROCESS_BYTES,
    GradientSize,
    LinearSize,
    ModelSpec,
    RankSetting,
    logits_tokens,
    stages_conflict,
    uneven_split,
)

_ALIASES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""Aliases of sizes in transformers. Source: `GPT2Config.attribute_map`."""

Activation = Literal["gelu_new", "gelu"]
"""GELU as Hugging Face names it: GPT-2's tanh approximation, and the exact function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Spec(ModelSpec):
    """The sizes of a GPT-2, named as in config.json, except for `sequence_length`."""

    model_type: str = "gpt2"
    n_layer: int
    n_head: int
    n_embd: int
    sequence_length: int = 1024
    vocab_size: int = 50_257
    bias: bool = True
    n_positions: int | None = None
    """Longest context of the weights, in tokens; None = `sequence_length`."""
    activation: Activation = "gelu_new"

    def context(self) -> int:
        """Return the longest context of the weights in tokens."""
        return self.n_positions or self.sequence_length

    def num_layers(self) -> int:
        """Return the number of layers."""
        return self.n_layer

    def num_heads(self) -> int:
        """Return the number of attention heads of a layer."""
        return self.n_head

    def width(self) -> int:
        """Return the width of the residual stream."""
        return self.n_embd

    def is_tied(self) -> bool:
        """Return True, because the output head is always the token embedding."""
        return True

    def settings(self) -> dict[str, int | bool]:
        """Return this model's sizes as settings of the run config's [model] section."""
        return {
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.n_embd,
            "bias": self.bias,
        }

    def linears(self) -> tuple[LinearSize, ...]:
        """Return the layers' linears in the order of the forward pass, by transformers' paths."""
        return tuple(
            LinearSize(f"transformer.h.{layer}.{name}", inputs, outputs)
            for layer in range(self.n_layer)
            for name, inputs, outputs in self._layer_linears()
        )

    def why_not_tensor(self, ranks: int) -> str | None:
        """Return why `ranks` ranks cannot split each layer, or None if they can."""
        return uneven_split({"attention heads": self.n_head}, ranks)

    def why_not_stages(self, stages: int) -> str | None:
        """Return why the layers cannot be divided into `stages` stages, or None if they can."""
        return stages_conflict(self, stages)

    def why_not_quantized(self) -> str:
        """Return why the layers' linears cannot have 4 bits."""
        return "its weights are stored as (in, out), but 4-bit blocks need (out, in)"

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor as in transformers, with matrices as (in, out)."""
        width = self.n_embd
        yield "transformer.wte.weight", (self.vocab_size, width)
        yield "transformer.wpe.weight", (self.context(), width)
        for layer in range(self.n_layer):
            for norm in ("ln_1", "ln_2"):
                yield from self._with_bias(f"h.{layer}.{norm}", (width,))
            for name, inputs, outputs in self._layer_linears():
                yield from self._with_bias(f"h.{layer}.{name}", (inputs, outputs))
        yield from self._with_bias("ln_f", (width,))

    def _with_bias(
        self, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"transformer.{name}.weight", shape
        if self.bias:
            yield f"transformer.{name}.bias", shape[-1:]

    def _layer_linears(self) -> tuple[tuple[str, int, int], ...]:
        width = self.n_embd
        return (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        )

    def num_matrix_params(self) -> int:
        """Return the number of weights in the layers' matrices.

        A layer has 12 n_embd^2: 4 in attention, 8 in the MLP.
        """
        return self.n_layer * 12 * self.n_embd**2

    def num_params(self) -> int:
        """Return the number of all weights; the head, which is the token embedding, counts once."""
        width = self.n_embd
        norms = (2 * self.n_layer + 1) * width * (2 if self.bias else 1)
        biases = self.n_layer * 9 * width if self.bias else 0
        embeddings = (self.vocab_size + self.context()) * width
        return embeddings + self.num_matrix_params() + norms + biases

    def flops_per_token(self) -> int:
        """Return the floating-point operations of forward and backward for one token.

        Position embeddings, norms and biases have no matmul and are not counted.
        """
        multiplying = self.num_matrix_params() + self.embedding_size()
        return 6 * multiplying + 12 * self.n_layer * self.n_embd * self.sequence_length

    def memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory, the interpreter and torch included.

        The peak is at the end of the forward pass. Weights and two AdamW moments are fp32, 12 bytes
        per parameter. Gradients take 4 more. They exist at this time if there are other ranks,
        because of the exchange buckets, and in every micro-batch of a step after the first
        (`accumulates`). With `kernels`, a layer keeps the residual stream twice in fp32, and 10
        widths in the matmuls' dtype: 28 bytes per token and element of its width in bf16, 48 in
        fp32. Fragmentation adds 7 bytes, as measured for gpt2 in bf16. Only one chunk of logits is
        in memory.
        """
        size = setting.value_bytes()
        tokens = setting.micro_batch_size * self.sequence_length
        gradients = self.num_params() * 4
        held = self.num_params() * setting.held_bytes() + PROCESS_BYTES
        if setting.accumulates or not setting.alone:
            held, gradients = held + gradients, 0
        if not setting.kernels:
            # A layer keeps 18 x `n_embd` elements per token.
            layers = tokens * self.n_layer * 18 * self.n_embd * size
            logits = setting.plain_logits_bytes(self.vocab_size, tokens=tokens)
            logits += setting.chunked_head_bytes(self.vocab_size * self.n_embd)
            return held + max(layers + logits, gradients)
        widths = 8 + 10 * size + 7
        layers = tokens * self.n_layer * widths * self.n_embd
        logits = min(tokens, logits_tokens(self.vocab_size)) * self.vocab_size * size
        # In a step's only micro-batch, the head's gradient is computed in the exchange buffer.
        head = self.vocab_size * self.n_embd * 4 if setting.alone or setting.accumulates else 0
        copies = self.num_params() * 2 if setting.dtype == "bf16" else 0
        return held + copies + max(layers + logits + head, gradients)

    def gradient_sizes(self) -> tuple[GradientSize, ...]:
        """Return the parameters in the order in which the backward pass finishes them."""
        return tuple(self._gradient_sizes())

    def _gradient_sizes(self) -> Iterator[GradientSize]:
        width, has_bias = self.n_embd, int(self.bias)
        norm = GradientSize(width * (1 + has_bias), "vector")
        yield norm
        for _ in range(self.n_layer):
            for rows, columns in ((4, 1), (1, 4), (1, 1), (1, 3)):
                if (rows, columns) == (1, 1):
                    yield norm
                yield GradientSize(width * columns * has_bias, "vector")
                yield GradientSize(rows * columns * width**2, "matrix")
            yield norm
        yield GradientSize(self.context() * width, "embedding")
        yield GradientSize(self.embedding_size(), "embedding")

    def with_sequence_length(self, tokens: int) -> Self:
        """Return the same model, trained on sequences of `tokens`; its context is unchanged."""
        return replace(self, sequence_length=tokens, n_positions=self.context())


PRESETS = {
    # `tiny` trains in minutes on two cores; the others are the GPT-2 family,
    # https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
    "tiny": Gpt2Spec(n_layer=4, n_head=4, n_embd=128),
    "gpt2": Gpt2Spec(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": Gpt2Spec(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": Gpt2Spec(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": Gpt2Spec(n_layer=48, n_head=25, n_embd=1600),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """The fields of a GPT-2's config.json that determine its sizes and computation."""

    model_type: str
    n_layer: int = checked(low=1, high=10_000)
    n_head: int = checked(low=1, high=10_000)
    n_embd: int = checked(low=1, high=2**20)
    n_positions: int = checked(low=1, high=2**24)
    vocab_size: int = checked(low=1, high=2**24)
    activation_function: str = "gelu_new"
    n_inner: int | None = None
    """Width of the MLP; None = 4 x n_embd."""
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    per_layer_config: Any = None
    """Overrides for single layers, which transformers supports."""
    layer_types: Any = None
    """Only transformers' key-value cache reads this key and the next three."""
    sliding_window: Any = None
    attention_chunk_size: Any = None
    kv_sharing_modes: Any = None
    tileforge_bias: bool = True
    """False if Tileforge trained without biases; the file then contains zeros."""


def read(raw: Mapping[str, object], *, where: str) -> Gpt2Spec:
    """Build the spec from a config.json; messages name the file `where`.

    Raises CheckpointError for a damaged file, and for a model that would load without an error but
    compute differently from GPT-2.
    """
    config = build(_Config, raw, where=where, fix=FIX, error=CheckpointError)
    _refuse_variants(config, where)
    for name, alias in _ALIASES.items():
        if raw.get(alias, raw[name]) != raw[name]:
            raise CheckpointError(
                f"{where}: {alias} = {shown(raw[alias])} and {name} = {shown(raw[name])} "
                f"contradict each other: both set the same size. {FIX}"
            )
    return Gpt2Spec(
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        sequence_length=config.n_positions,
        vocab_size=config.vocab_size,
        bias=config.tileforge_bias,
        activation=cast(Activation, config.activation_function),
    )


def _refuse_variants(config: _Config, where: str) -> None:
    width = 4 * config.n_embd
    for key, supported in (
        ("tie_word_embeddings", (True,)),
        ("scale_attn_weights", (True,)),
        ("scale_attn_by_inverse_layer_idx", (False,)),
        ("layer_norm_epsilon", (1e-5,)),
        ("n_inner", (None, width)),
        ("per_layer_config", (None, {})),
        ("layer_types", (None,)),
        ("sliding_window", (None,)),
        ("attention_chunk_size", (None,)),
        ("kv_sharing_modes", (None,)),
        ("activation_function", ("gelu_new", "gelu")),
    ):
        value = getattr(config, key)
        if value not in supported:
            raise CheckpointError(
                f"{where}: {key} = {shown(value)}: must be {' or '.join(map(str, supported))}, as "
                f"in GPT-2. {FIX}"
            )
    if config.n_embd % config.n_head:
        raise CheckpointError(
            f"{where}: n_embd = {config.n_embd} is not a multiple of n_head = {config.n_head}. "
            f"{FIX}"
        )
