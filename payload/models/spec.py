"""Sizes and costs of a model of any family: parameters, FLOPs, bytes.

The launch plan, the trainer and the benchmarks all use these numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from payload.core.dtype import Dtype
from payload.models.multimodal_config import Whole
from payload.models.stages import outer_weights, stage_layers, stage_weights
from payload.optimizers.registry import default_state_bytes

_MOST_LOGITS_TOKENS = 2048
_MOST_LOGITS = 160 * 10**6

# Memory of Python, torch and the stacks of their threads, measured on the development machine.
PROCESS_BYTES = 350 * 2**20

EXPERT_BIASES = (".e_score_correction_bias", ".ffn.gate.bias")
"""Name endings of biases that only choose experts. These biases are not parameters, and are fp32 in
every copy of the weights. The second ending is DeepSeek-V4's."""

WHOLE_ACTIVATIONS = 12 / 28
"""Share of a layer's activations that every tensor rank holds in full: norms, residual stream."""

BYTES_PER_WEIGHT = 4
"""Bytes of an fp32 weight."""


def logits_tokens(vocab_size: int) -> int:
    """Return how many tokens' logits the kernels compute at a time: a power of two, up to 2048.

    For a vocabulary of 50,257, the logits of a chunk take 206 MB in bf16. A larger vocabulary has
    smaller chunks: 1024 tokens for 151,936 rows, 512 for 262,144. The logits of a chunk then take
    less than 320 MB.
    """
    most: int = 2 ** (max(_MOST_LOGITS // vocab_size, 1).bit_length() - 1)
    return min(most, _MOST_LOGITS_TOKENS)


@dataclass(frozen=True, slots=True)
class GradientSize:
    """The size of a trainable parameter, in a list ordered by the backward pass."""

    elements: int
    kind: Literal["head", "matrix", "vector", "embedding"]
    """`head`: a separate output head. `matrix`: a matrix of a layer; matmuls with such matrices
    take most of the backward pass. `vector`: norms and biases. `embedding`: looked up at the start
    of the forward pass, so its gradient is complete last."""


@dataclass(frozen=True, slots=True)
class LinearSize:
    """A linear of a layer, a possible target of an adapter."""

    name: str
    """Dotted path of the linear in the model, with this project's module names."""
    inputs: int
    outputs: int
    is_expert: bool = False
    """True for a linear of one expert in a mixture of experts."""


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """A matrix outside the linears, or a stack of matrices, that an adapter can target by name."""

    name: str
    """Dotted path of the parameter in the model, with this project's module names."""
    inputs: int
    outputs: int
    stack: int = 1
    """Number of matrices that the parameter stacks: the experts of a layer."""
    is_expert: bool = False

    def elements(self) -> int:
        """Return the number of elements."""
        return self.stack * self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetting:
    """The settings of a rank's training that affect its memory."""

    micro_batch_size: int
    """Number of sequences in a micro-batch."""
    dtype: Dtype
    kernels: bool
    alone: bool
    """True if there are no other ranks to exchange gradients with."""
    accumulates: bool
    """True if a step has more than one micro-batch."""
    shards: int = 1
    """Number of ranks that shard the model; 1 = each rank holds all of it."""
    tensor: int = 1
    """Number of ranks that split each layer: its heads, MLP and vocabulary."""
    stages: int = 1
    """Number of pipeline stages, each with some of the layers."""
    micro_batches_kept: int = 1
    """Number of micro-batches for which the first stage keeps activations. Each later stage keeps
    one micro-batch less."""

    state_bytes: int = field(default_factory=default_state_bytes)
    """Bytes of optimizer state for a trained weight."""
    keeps_bf16_gradients: tuple[bool, bool] = (True, True)
    """True for the gradients that may stay in bf16: of the layers' matrices, and of the head."""
    chunks_loss: bool = False
    """True if the loss is computed in chunks of tokens without kernels, as on GPUs."""

    def value_bytes(self) -> int:
        """Return the bytes of an element in the matmuls."""
        return 2 if self.dtype == "bf16" else 4

    def plain_logits_bytes(self, rows: int, *, tokens: int) -> int:
        """Return the bytes of the logits without kernels, for a head with `rows` rows.

        In fp32 a logit takes 12 bytes: itself, log-softmax and the gradient. In bf16 it also exists
        as the bf16 result of the matmul with its gradient.
        """
        size = 16 if self.dtype == "bf16" else 12
        return size * rows * (min(tokens, logits_tokens(rows)) if self.chunks_loss else tokens)

    def chunked_head_bytes(self, weights: int) -> int:
        """Return the bytes of a trained head's gradient and bf16 copies, if its loss is chunked."""
        return 8 * weights if self.chunks_loss else 0

    def held_bytes(self) -> int:
        """Return the bytes of a trained weight in fp32 and its optimizer state."""
        return BYTES_PER_WEIGHT + self.state_bytes

    def trained_bytes(self) -> int:
        """Return the bytes of a trained weight, its optimizer state and its gradient in fp32."""
        return self.held_bytes() + BYTES_PER_WEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ABC):
    """A model's sizes and costs; every family has a subclass with its own config's fields."""

    model_type: str
    """The `model_type` of config.json, by which the registries find the family."""
    sequence_length: int
    """Tokens of a training sequence."""
    vocab_size: int
    """Rows of the token embedding; a padded vocabulary has more rows than the tokenizer has
    tokens."""
    whole: Whole | None = field(default=None, repr=False, compare=False)
    """The multimodal model that contains this text model; None for any other model."""

    def with_vocab_size(self, rows: int) -> Self:
        """Return the same model with `rows` rows in its embedding and output head."""
        return replace(self, vocab_size=rows)

    def config_read(self) -> Mapping[str, Any]:
        """Return the config.json that was read, if the family depends on it."""
        return {}

    @abstractmethod
    def context(self) -> int:
        """Return the longest context of the weights in tokens."""

    @abstractmethod
    def num_layers(self) -> int:
        """Return the number of layers."""

    @abstractmethod
    def num_heads(self) -> int:
        """Return the number of attention (query) heads of a layer."""

    @abstractmethod
    def width(self) -> int:
        """Return the width of the residual stream."""

    def num_params(self) -> int:
        """Return the number of all weights, trained or not; tied weights count once."""
        return sum(math.prod(shape) for _, shape in self.tensor_shapes())

    @abstractmethod
    def flops_per_token(self) -> int:
        """Return the floating-point operations of forward and backward for one token.

        The count is 6 per weight of a matmul, plus 12 x layers x heads x head width x sequence
        length for full (not causal) attention. Source: PaLM, appendix B,
        https://arxiv.org/abs/2204.02311.
        """

    def recurrent_flops(self) -> int:
        """Return the part of `flops_per_token` from recurrences; 0 without them."""
        return 0

    @abstractmethod
    def memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory, the interpreter and torch included."""

    def checkpointed_memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory with activation checkpointing.

        Each layer keeps its input in fp32. Only one layer at a time has its other activations in
        memory.
        """
        whole, empty = (
            self.memory_bytes(each) for each in (setting, replace(setting, micro_batch_size=0))
        )
        tokens, logits = (
            setting.micro_batch_size * self.sequence_length,
            self._logits_bytes(setting),
        )
        layers = max(0, whole - empty - logits)
        kept = tokens * self.width() * 4 * self.num_layers()
        return min(whole, whole - layers + layers // max(1, self.num_layers()) + kept)

    def rank_memory_bytes(self, setting: RankSetting, *, checkpointed: bool = False) -> int:
        """Estimate a rank's peak memory, with the full model or with its shard.

        A sharded rank has 1/N of the state. In addition, two parts are in memory in full: the
        weights outside the layers (and their gradients if trained), and the weights, gradients and
        exchange buffers of one layer. At the end of the backward pass, the activations are gone,
        and the weights outside the layers need the buffers.
        """
        estimate = self.checkpointed_memory_bytes if checkpointed else self.memory_bytes
        if setting.tensor > 1 or setting.stages > 1:
            return self._part_memory_bytes(setting, estimate)
        if setting.shards == 1:
            return estimate(setting)
        whole = replace(setting, alone=False, accumulates=True)
        activations = estimate(whole) - estimate(replace(whole, micro_batch_size=0))
        return PROCESS_BYTES + self._shard_bytes(setting, activations, outer=self.outer_elements())

    def _shard_bytes(
        self, setting: RankSetting, activations: float, *, outer: float, share: float = 1.0
    ) -> int:
        """Estimate the peak memory of a rank that holds 1/N of a part of the weights.

        The part is `share` of all weights; `outer` weights of the part are outside the layers.
        """
        trained = self.num_trainable_params() == self.num_params()
        layer = (self.num_params() - self.outer_elements()) / max(1, self.num_layers())
        layer /= setting.tensor
        exchanged = 3 * BYTES_PER_WEIGHT if trained else 0
        inner = outer * (BYTES_PER_WEIGHT + BYTES_PER_WEIGHT * trained)
        inner += layer * (BYTES_PER_WEIGHT + exchanged) + activations
        last = outer * (BYTES_PER_WEIGHT + exchanged)
        state = self.weight_bytes(setting)
        state += self.num_trainable_params() * setting.held_bytes()
        return round(state * share / setting.shards + max(inner, last))

    def _part_memory_bytes(
        self, setting: RankSetting, estimate: Callable[[RankSetting], int]
    ) -> int:
        """Estimate the largest rank's peak memory with tensor ranks, pipeline stages, or both.

        Each tensor rank holds the norms and the residual stream in full. A stage keeps the
        activations of several micro-batches, and the last stage also has the logits. With shards,
        each rank holds 1/N of this state.
        """
        # Imported here: the module imports this one.
        whole = replace(setting, tensor=1, stages=1, alone=False)
        empty = estimate(replace(whole, micro_batch_size=0))
        logits = self._logits_bytes(setting)
        layers = max(0, estimate(whole) - empty - logits) / self.num_layers()
        layers *= WHOLE_ACTIVATIONS + (1 - WHOLE_ACTIVATIONS) / setting.tensor
        state = (empty - PROCESS_BYTES) / self.num_params() / setting.tensor
        ranges, weights = stage_layers(self, setting.stages), stage_weights(self, setting.stages)
        outer = outer_weights(self, setting.stages)
        found: list[float] = []
        for stage, (numbers, held) in enumerate(zip(ranges, weights, strict=True)):
            kept = max(1, setting.micro_batches_kept - stage) if setting.stages > 1 else 1
            activations = len(numbers) * kept * layers
            if stage == setting.stages - 1:
                activations += logits / setting.tensor
            if setting.shards == 1:
                found.append(held * state + activations)
                continue
            share = held / self.num_params() / setting.tensor
            here_outer = outer[stage] / setting.tensor
            found.append(self._shard_bytes(setting, activations, outer=here_outer, share=share))
        return PROCESS_BYTES + round(max(found))

    def _logits_bytes(self, setting: RankSetting) -> int:
        tokens, rows = setting.micro_batch_size * self.sequence_length, self.head_rows()
        if setting.kernels:
            return min(tokens, logits_tokens(rows)) * rows * setting.value_bytes()
        return setting.plain_logits_bytes(rows, tokens=tokens)

    def bf16_gradients(self, setting: RankSetting) -> tuple[bool, bool]:
        """Return whether the gradients of the layers' linears, and of the head, are in bf16.

        A gradient is in bf16 only if it comes from a single bf16 matmul: with one rank and one
        micro-batch per step. Autocast would also round the result of such a matmul to bf16. Sums
        over micro-batches or ranks are in fp32.
        """
        del setting
        return False, False

    def weight_bytes(self, setting: RankSetting) -> int:
        """Return the bytes of all weights during training."""
        del setting
        return self.num_params() * BYTES_PER_WEIGHT

    def outer_elements(self) -> int:
        """Return the number of elements outside the layers: in the token embedding and the head."""
        heads = 0 if self.is_tied() else self.head_rows() * self.width()
        return min(self.num_params(), self.embedding_size() + heads)

    @abstractmethod
    def gradient_sizes(self) -> tuple[GradientSize, ...]:
        """Return the trainable parameters in the order in which the backward pass finishes them."""

    @abstractmethod
    def is_tied(self) -> bool:
        """Return whether the output head is the token embedding."""

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor of a checkpoint; nothing if unknown."""
        yield from ()

    def is_counted(self) -> bool:
        """Return whether the parameters are counted.

        For some models, config.json alone is not enough.
        """
        return True

    def with_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
        """Return the same model, with its parameters counted from tensor shapes if necessary."""
        del shapes
        return self

    def note(self) -> str | None:
        """Return a note on operations or weights that the counts leave out, or None."""
        return None

    def linears(self) -> tuple[LinearSize, ...]:
        """Return the layers' linears in the order of the forward pass; empty if unknown."""
        return ()

    def parameters_beside_linears(self) -> tuple[ParameterSize, ...]:
        """Return the parameters outside the linears that an adapter can target.

        Empty if the modules are unknown.
        """
        return ()

    def expert_params(self) -> int:
        """Return the number of weights in the experts of a mixture; 0 without experts."""
        return 0

    def has_known_modules(self) -> bool:
        """Return whether the modules' names are known, not only the tensors' names in the files."""
        return bool(self.linears())

    def matmul_size(self) -> int:
        """Return the number of weights in the matmuls of each token, including the output head."""
        linears = sum(each.inputs * each.outputs for each in self.linears())
        return linears + self.head_rows() * self.width()

    def why_not_quantized(self) -> str | None:
        """Return why the layers' linears cannot have 4 bits, or None if they can."""
        return None

    def why_fixed_vocabulary(self) -> str | None:
        """Return why the vocabulary cannot grow, or None if it can."""
        return None

    def why_not_packed(self) -> str | None:
        """Return why a block should hold only one conversation, or None if it can hold several."""
        return None

    def why_not_tensor(self, ranks: int) -> str | None:
        """Return why `ranks` ranks cannot split each layer, or None if they can."""
        del ranks
        return (
            f"model_type = {self.model_type!r} uses transformers' layers, which cannot be split "
            "over ranks"
        )

    def why_not_stages(self, stages: int) -> str | None:
        """Return why the layers cannot be divided into `stages` stages, or None if they can."""
        del stages
        return (
            f"model_type = {self.model_type!r} uses transformers' layers, which cannot be split "
            "over ranks"
        )

    def rope_switch(self) -> int | None:
        """Return the text length in tokens above which all positions are encoded differently.

        When a text grows above this length, keys that were cached before cannot be
        used any more. None = there is no limit.
        """
        return None

    def num_trainable_params(self) -> int:
        """Return the number of weights with a gradient and optimizer state."""
        return self.num_params()

    def head_rows(self) -> int:
        """Return the number of rows in the output head; a token has one logit for each row."""
        return self.vocab_size

    def task_head_size(self) -> int:
        """Return the number of elements in a task's head.

        Such a head is trained in addition to an adapter.
        """
        return 0

    def embedding_size(self) -> int:
        """Return the number of elements in the token embedding."""
        return self.vocab_size * self.width()

    def checkpoint_bytes(self, *, state_bytes: int | None = None) -> int:
        """Return the size of a checkpoint on disk, without the small files.

        `state_bytes` is the optimizer state of a trained weight; None = the state of the default
        optimizer.
        """
        state = default_state_bytes() if state_bytes is None else state_bytes
        copied = 0 if self.whole is None else self.whole.copied_bytes()
        saved = self.num_saved_params() * BYTES_PER_WEIGHT + copied
        return saved + self.num_trainable_params() * state

    def num_saved_params(self) -> int:
        """Return the number of weights in a checkpoint."""
        return self.num_params()

    def settings(self) -> dict[str, int | bool]:
        """Return this model's sizes as settings of the run config's [model] section."""
        return {"n_layer": self.num_layers(), "n_head": self.num_heads(), "n_embd": self.width()}

    def summary(self) -> str:
        """Return a description of the model's sizes."""
        return (
            f"{self.num_layers()} layers, {self.num_heads()} heads, width {self.width()}, context "
            f"{self.context()}"
        )

    def with_sequence_length(self, tokens: int) -> Self:
        """Return the same model, trained on sequences of `tokens`; its context is unchanged."""
        return replace(self, sequence_length=tokens)


def uneven_split(counts: Mapping[str, int], ranks: int) -> str | None:
    """Return a message on the first count that `ranks` ranks cannot divide evenly, or None."""
    for name, count in counts.items():
        if count % ranks:
            return f"its {count} {name} are not a multiple of {ranks}"
    return None


def stages_conflict(spec: ModelSpec, stages: int) -> str | None:
    """Return a message if there are more pipeline stages than layers, or None."""
    if stages > spec.num_layers():
        return f"it has fewer layers ({spec.num_layers()}) than stages"
    return None
