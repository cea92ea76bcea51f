"""A model's figures, for every family: parameters, FLOPs, bytes. Pure arithmetic.

The launch plan, the trainer and the benchmarks all print these numbers, so one place counts them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from payload.core.dtype import Dtype
from payload.models.stages import outer_weights, stage_layers, stage_weights
from payload.optimizers.registry import default_state_bytes

_MOST_LOGITS_TOKENS = 2048
_MOST_LOGITS = 160 * 10**6

# Python, torch and their threads' stacks, on the development machine.
PROCESS_BYTES = 350 * 2**20

WHOLE_ACTIVATIONS = 12 / 28
"""Share of a layer's activations that every tensor rank has: its norms and the residual stream."""

BYTES_PER_WEIGHT = 4
"""An fp32 weight in a checkpoint on disk."""


def logits_tokens(vocab_size: int) -> int:
    """Return the tokens whose logits the kernels' head has at once: a power of two, at most 2048.

    With 50,257 words these are 206 MB of bf16. A larger vocabulary has fewer tokens at a time, so
    that the logits stay below 320 MB: 1024 of 151,936 words, 512 of 262,144.
    """
    most: int = 2 ** (max(_MOST_LOGITS // vocab_size, 1).bit_length() - 1)
    return min(most, _MOST_LOGITS_TOKENS)


@dataclass(frozen=True, slots=True)
class GradientSize:
    """One trainable parameter, at its place in the order of the backward pass."""

    elements: int
    kind: Literal["head", "matrix", "vector", "embedding"]
    """`head`: an output head of its own. `matrix`: of a layer; its matmuls are what the backward
    pass spends its time on. `vector`: norms and biases. `embedding`: looked up at the start of the
    forward pass, so its gradient is the last one."""


@dataclass(frozen=True, slots=True)
class LinearSize:
    """A linear of a layer, which an adapter can go on."""

    name: str
    """Its dotted path below the model, in the names of this project's modules."""
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetting:
    """How a rank trains, as far as its memory depends on it."""

    micro_batch_size: int
    """Sequences of a pass."""
    dtype: Dtype
    kernels: bool
    alone: bool
    """There are no other ranks to exchange gradients with."""
    accumulates: bool
    """A step has more than one pass."""
    shards: int = 1
    """Ranks that hold the model together, each a part of it; 1 = each rank holds all of it."""
    tensor: int = 1
    """Ranks that compute each layer together, each with a part of its heads, MLP and words."""
    stages: int = 1
    """Pipeline stages, each with some of the layers."""
    passes_kept: int = 1
    """Passes whose activations the first stage keeps; each one behind it keeps one less."""

    state_bytes: int = field(default_factory=default_state_bytes)
    """Bytes of optimizer state of a trained weight."""

    def value_bytes(self) -> int:
        """Return the bytes of a number in the matmuls."""
        return 2 if self.dtype == "bf16" else 4

    def held_bytes(self) -> int:
        """Return the bytes of a trained weight in fp32 and its optimizer state."""
        return BYTES_PER_WEIGHT + self.state_bytes

    def trained_bytes(self) -> int:
        """Return the same with the weight's gradient in fp32."""
        return self.held_bytes() + BYTES_PER_WEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ABC):
    """A model's numbers. Every family has a subclass, with its own config's fields."""

    model_type: str
    """As in config.json; the registries find the family's files by it."""
    sequence_length: int
    """Tokens of a training sequence."""
    vocab_size: int
    """Rows of the token embedding; a padded vocabulary has more than the tokenizer has tokens."""

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
        """Return the number of all weights, trained or not; tied ones count once."""
        return sum(math.prod(shape) for _, shape in self.tensor_shapes())

    @abstractmethod
    def flops_per_token(self) -> int:
        """Return the floating-point operations of forward and backward for one token.

        6 per parameter that multiplies, plus 12 x layers x heads x head width x sequence length for
        full (not causal) attention. Source: PaLM, appendix B, https://arxiv.org/abs/2204.02311.
        """

    @abstractmethod
    def memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory, the interpreter and torch included."""

    def checkpointed_memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory with activation checkpointing.

        A layer's input is kept in fp32, and one layer at a time has the rest.
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
        """Estimate a rank's peak memory, with all of the model or with its shard.

        A sharded rank has 1/N of the state. Whole at one time are what belongs to no layer (its
        weights, and gradients where it is trained) and one layer: its weights, its gradients, and
        both sides of their exchange. At the end of the backward pass it is the same for what
        belongs to no layer, in place of the activations.
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
        """Estimate what a rank with 1/N of `share` of the weights takes at its peak.

        `outer` of these belong to no layer.
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
        """Estimate the peak of the largest rank, with a part of each layer, some layers, or both.

        Of a layer's activations, norms and the residual stream are whole on each tensor rank. A
        stage keeps the activations of several passes; the last one has the logits. Shards have a
        part of the state of these.
        """
        # Loaded where it is used: it is about specs.
        whole = replace(setting, tensor=1, stages=1, alone=False)
        empty = estimate(replace(whole, micro_batch_size=0))
        logits = self._logits_bytes(setting)
        layers = max(0, estimate(whole) - empty - logits) / self.num_layers()
        layers *= WHOLE_ACTIVATIONS + (1 - WHOLE_ACTIVATIONS) / setting.tensor
        state = (empty - PROCESS_BYTES) / self.num_params() / setting.tensor
        here, weights = stage_layers(self, setting.stages), stage_weights(self, setting.stages)
        outer = outer_weights(self, setting.stages)
        found: list[float] = []
        for stage, (numbers, held) in enumerate(zip(here, weights, strict=True)):
            kept = max(1, setting.passes_kept - stage) if setting.stages > 1 else 1
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
        return tokens * rows * 16

    def bf16_gradients(self, setting: RankSetting) -> tuple[bool, bool]:
        """Say whether the gradients of the layers' linears, and the head's, are kept in bf16.

        Only where a gradient comes from one bf16 matmul, which autocast rounds as well: a rank is
        alone and makes one pass a step. Sums over passes or ranks are made in fp32.
        """
        del setting
        return False, False

    def weight_bytes(self, setting: RankSetting) -> int:
        """Return the bytes of all weights while they are trained."""
        del setting
        return self.num_params() * BYTES_PER_WEIGHT

    def outer_elements(self) -> int:
        """Return the elements of what belongs to no layer: the token embedding and the head."""
        heads = 0 if self.is_tied() else self.head_rows() * self.width()
        return min(self.num_params(), self.embedding_size() + heads)

    @abstractmethod
    def gradient_sizes(self) -> tuple[GradientSize, ...]:
        """Return the trainable parameters in the order in which the backward pass finishes them."""

    @abstractmethod
    def is_tied(self) -> bool:
        """Say whether the output head is the token embedding."""

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor that a checkpoint has; nothing = not known here."""
        yield from ()

    def is_counted(self) -> bool:
        """Say whether the parameters are known: some config.json alone do not say."""
        return True

    def with_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
        """Return the same model, counted by the shapes of its tensors where that is needed."""
        del shapes
        return self

    def note(self) -> str | None:
        """Say what the numbers leave out, or None."""
        return None

    def linears(self) -> tuple[LinearSize, ...]:
        """Return the layers' linears in the order of the forward pass; empty = not known here."""
        return ()

    def why_not_quantized(self) -> str | None:
        """Say why the layers' linears cannot be of 4 bits, or None where they can."""
        return None

    def why_not_tensor(self, ranks: int) -> str | None:
        """Say why `ranks` ranks cannot compute each layer together, or None where they can."""
        del ranks
        return f"model_type = {self.model_type!r} runs as transformers has it, whole on each rank"

    def why_not_stages(self, stages: int) -> str | None:
        """Say why the layers cannot be on so many pipeline stages, or None where they can."""
        del stages
        return f"model_type = {self.model_type!r} runs as transformers has it, whole on each rank"

    def num_trainable_params(self) -> int:
        """Return the number of weights that have a gradient and optimizer state."""
        return self.num_params()

    def head_rows(self) -> int:
        """Return the rows of the output head, which every token's logits come from."""
        return self.vocab_size

    def task_head_size(self) -> int:
        """Return the elements of a head that is trained beside an adapter, too."""
        return 0

    def embedding_size(self) -> int:
        """Return the elements of the token embedding."""
        return self.vocab_size * self.width()

    def checkpoint_bytes(self, *, state_bytes: int | None = None) -> int:
        """Return what a checkpoint takes on disk, without the small files.

        `state_bytes` are those of a trained weight's optimizer state; None = the default's.
        """
        state = default_state_bytes() if state_bytes is None else state_bytes
        return self.num_saved_params() * BYTES_PER_WEIGHT + self.num_trainable_params() * state

    def num_saved_params(self) -> int:
        """Return the number of weights that a checkpoint has."""
        return self.num_params()

    def settings(self) -> dict[str, int | bool]:
        """Return what the run config's [model] section says of the sizes, for this model."""
        return {"n_layer": self.num_layers(), "n_head": self.num_heads(), "n_embd": self.width()}

    def summary(self) -> str:
        """Describe the model's sizes in words."""
        return (
            f"{self.num_layers()} layers, {self.num_heads()} heads, width {self.width()}, context "
            f"{self.context()}"
        )

    def with_sequence_length(self, tokens: int) -> Self:
        """Return the same model, trained on sequences of `tokens`; its context stays."""
        return replace(self, sequence_length=tokens)


def uneven(counts: Mapping[str, int], ranks: int) -> str | None:
    """Say what of a layer `ranks` ranks cannot share out evenly, or None."""
    for name, count in counts.items():
        if count % ranks:
            return f"its {count} {name} are no multiple of {ranks}"
    return None


def too_deep(spec: ModelSpec, stages: int) -> str | None:
    """Say that there are more pipeline stages than layers, or None."""
    if stages > spec.num_layers():
        return f"it has fewer layers ({spec.num_layers()}) than stages"
    return None
