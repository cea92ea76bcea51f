"""Sizes and costs of LoRA: which linears get an adapter, and which weights are trained.

LoRA: https://arxiv.org/abs/2106.09685. rsLoRA's scale: https://arxiv.org/abs/2312.03732.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from payload.core.errors import ConfigError
from payload.models.nf4 import nf4_bytes
from payload.models.spec import (
    BYTES_PER_WEIGHT,
    PROCESS_BYTES,
    GradientSize,
    LinearSize,
    ModelSpec,
    ParameterSize,
    RankSetting,
    logits_tokens,
)
from payload.models.wrapper_spec import WrappedSpec

ALL_LINEAR = "all-linear"
"""Every linear of the layers, without the output head, as in PEFT."""


NEW_TOKENS = "new"
"""The tokens that `prepare --add-special-tokens` added to the tokenizer of the data."""
NO_TOKENS = "none"


def token_ids(train_tokens: str) -> tuple[int, ...]:
    """Return the token ids in the setting `adapter.train_tokens`.

    The result is empty for `new`, whose ids are only known from the data.

    Raises ConfigError.
    """
    if train_tokens in (NEW_TOKENS, NO_TOKENS):
        return ()
    words = [word.strip() for word in train_tokens.split(",")]
    ids = tuple(int(word) for word in words if word.isascii() and word.isdecimal())
    if len(ids) < len(words) or len(set(ids)) < len(ids):
        raise ConfigError(
            f"adapter.train_tokens = {train_tokens!r}: must be {NEW_TOKENS!r}, {NO_TOKENS!r}, or "
            "different token ids separated by commas, as in '32000,32001'."
        )
    return ids


def target_names(target: str) -> tuple[str, ...] | None:
    """Return the module names in the setting `adapter.target`, or None for all linears.

    Raises ConfigError for an empty name.
    """
    if target.strip() == ALL_LINEAR:
        return None
    names = tuple(name.strip() for name in target.split(","))
    if not all(names):
        raise ConfigError(
            f"adapter.target = {target!r}: a name is empty. Use {ALL_LINEAR!r} or names of linears "
            "separated by commas, as in 'q_proj,v_proj'."
        )
    return names


def is_target(module: str, names: tuple[str, ...] | None) -> bool:
    """Return whether the linear at the path `module` has an adapter, by PEFT's rules for names.

    The name of a linear's weight also selects the linear, as in PEFT's `target_parameters`.
    """
    return names is None or ALL_LINEAR in names or _names_linear(module, names)


def parameter_names(
    names: tuple[str, ...] | None, linears: Iterable[str], parameters: Iterable[str]
) -> tuple[str, ...]:
    """Return the names in `adapter.target` that select parameters: PEFT's `target_parameters`.

    A name that matches a linear selects only the linear.
    """
    paths, others = tuple(linears), tuple(parameters)
    return tuple(
        name
        for name in names or ()
        if not any(_names_linear(path, (name,)) for path in paths)
        and any(_is_named(path, (name,)) for path in others)
    )


def is_parameter_target(parameter: str, names: tuple[str, ...]) -> bool:
    """Return whether the parameter at this path has an adapter.

    `names` is the result of `parameter_names`.
    """
    return _is_named(parameter, names)


def _names_linear(path: str, names: tuple[str, ...]) -> bool:
    return _is_named(path, names) or _is_named(f"{path}.weight", names)


def _is_named(path: str, names: tuple[str, ...]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def scale(*, rank: int, alpha: float, rslora: bool) -> float:
    """Return the factor by which the adapter's output is multiplied."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedSpec(WrappedSpec):
    """A frozen base with an adapter on some of its linears."""

    rank: int
    targets: tuple[str, ...] | None
    """Names of the linears with an adapter; None = all linears."""
    has_dropout: bool = False
    is_quantized: bool = False
    """True if the layers' linears are in 4 bits; other base weights have the matmuls' dtype."""
    is_dora: bool = False
    """True if DoRA also trains the norm of each output's weights."""
    tokens: tuple[int, ...] = ()
    """Tokens whose rows of embedding and head are trained."""

    @classmethod
    def of(
        cls,
        base: ModelSpec,
        *,
        rank: int,
        target: str,
        dropout: float = 0.0,
        is_quantized: bool = False,
        is_dora: bool = False,
        train_tokens: str = NEW_TOKENS,
    ) -> AdaptedSpec:
        """Return the spec of `base` with an adapter.

        Raises ConfigError for an unknown target or token, and for a rank above the largest target's
        width.
        """
        tokens = token_ids(train_tokens)
        if tokens and max(tokens) >= base.vocab_size:
            raise ConfigError(
                f"adapter.train_tokens: token {max(tokens)} is outside the model's vocabulary of "
                f"{base.vocab_size:,}. Use smaller ids, or add tokens with prepare "
                "--add-special-tokens."
            )
        names = target_names(target)
        known, others = base.linears(), base.parameters_beside_linears()
        for name in names or ():
            is_linear = any(is_target(each.name, (name,)) for each in known)
            is_known = is_linear or any(_is_named(each.name, (name,)) for each in others)
            if not is_known and base.has_known_modules():
                choices = sorted({each.name.rpartition(".")[2] for each in known} | _short(others))
                raise ConfigError(
                    f"adapter.target = {target!r}: the model has no linear {name!r}. Use "
                    f"{ALL_LINEAR!r} or some of {', '.join(choices)}."
                )
        chosen = _chosen(names, base)
        if chosen and (dropout or is_dora):
            key = "dropout" if dropout else "dora"
            raise ConfigError(
                f"adapter.{key}: PEFT does not support this setting for a parameter in "
                f"adapter.target ({_last_two(chosen[0].name)}). Turn adapter.{key} off, or remove "
                "the parameter."
            )
        adapted: list[LinearSize | ParameterSize] = [
            *(each for each in known if is_target(each.name, names)),
            *chosen,
        ]
        width = max((min(each.inputs, each.outputs) for each in adapted), default=rank)
        if rank > width:
            raise ConfigError(
                f"adapter.rank = {rank} is above the width of the adapted linears, {width}. "
                f"Use {width} or less."
            )
        return cls(
            model_type=base.model_type,
            sequence_length=base.sequence_length,
            vocab_size=base.vocab_size,
            base=base,
            rank=rank,
            targets=names,
            has_dropout=dropout > 0,
            is_quantized=is_quantized,
            is_dora=is_dora,
            tokens=tokens,
        )

    def num_params(self) -> int:
        """Return the number of weights of the base and the adapter together."""
        trained_beside = self.base.task_head_size()
        return self.base.num_params() - trained_beside + self.num_trainable_params()

    def num_trainable_params(self) -> int:
        """Return the number of the adapter's weights."""
        adapter = sum(
            self.rank * (each.inputs + each.outputs) + each.outputs * self.is_dora
            for each in self._adapted()
        )
        adapter += sum(map(self._adapter_size, self._adapted_parameters()))
        adapter += sum(self._token_rows())
        return adapter + self.base.task_head_size()

    def flops_per_token(self) -> int:
        """Return the floating-point operations of forward and backward for one token.

        The base's weights get no gradient, so each weight of a matmul costs 4 FLOPs per token
        instead of 6.
        """
        frozen = self.base.matmul_size() - self.base.task_head_size()
        trained = self.num_trainable_params() - self.base.task_head_size()
        return self.base.flops_per_token() - 2 * frozen + 6 * trained

    def memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory.

        The base's linears are in the dtype of the matmuls and have neither gradients nor optimizer
        state. Loading holds the full base in fp32, and this memory is not returned to the system.
        """
        if self.is_quantized:
            return self._quantized_memory_bytes(setting)
        size, linears = (
            setting.value_bytes(),
            sum(each.inputs * each.outputs for each in self.linears()),
        )
        held = linears * size + (self.base.num_params() - linears) * BYTES_PER_WEIGHT
        held += self.num_trainable_params() * setting.trained_bytes() + PROCESS_BYTES
        activations = self._activation_bytes(setting)
        if setting.kernels:
            activations += self.base.head_rows() * self.width() * size
        loading = self.base.num_params() * BYTES_PER_WEIGHT + PROCESS_BYTES
        return max(held + activations, loading)

    def _quantized_memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory with 4-bit linears, which have no kernels.

        Each linear has a bf16 copy while it is loaded and during its matmul. In an fp32 run, the
        linear also has an fp32 copy at these times.
        """
        plain = replace(setting, kernels=False)
        size, tokens = setting.value_bytes(), setting.micro_batch_size * self.sequence_length
        activations = self._activation_bytes(plain)
        if setting.kernels and not self.base.task_head_size():
            # The head computes its logits in chunks, with trained rows in fp32 and with a gradient.
            rows = self.base.head_rows()
            activations -= plain.plain_logits_bytes(rows, tokens=tokens)
            activations += min(tokens, logits_tokens(rows)) * rows * (12 if self.tokens else size)
        held = self.base_bytes(other_bytes=size)
        held += self.num_trainable_params() * setting.trained_bytes()
        largest = max((each.inputs * each.outputs for each in self.linears()), default=0)
        whole = 2 if setting.dtype == "bf16" else 2 + size
        return held + whole * largest + activations + PROCESS_BYTES

    def rank_memory_bytes(self, setting: RankSetting, *, checkpointed: bool = False) -> int:
        """Estimate a rank's peak memory, including the loading of the model.

        An fp32 run converts the unquantised weights of a quantised base one by one, before there
        are activations. The largest of these weights is the embedding.
        """
        # super() cannot be used: a dataclass with slots replaces the class that super() refers to.
        training = WrappedSpec.rank_memory_bytes(self, setting, checkpointed=checkpointed)
        if not self.is_quantized or setting.dtype == "bf16":
            return training
        widening = self.base_bytes(other_bytes=setting.value_bytes())
        widening += 2 * self.base.embedding_size() + PROCESS_BYTES
        return max(training, widening)

    def base_bytes(self, *, other_bytes: int) -> int:
        """Return the bytes of a quantised base's frozen weights.

        `other_bytes` is the size of an element outside the linears.
        """
        sizes = [each.inputs * each.outputs for each in self.linears()]
        others = self.base.num_params() - self.base.task_head_size() - sum(sizes)
        return sum(map(nf4_bytes, sizes)) + other_bytes * others

    def _activation_bytes(self, setting: RankSetting) -> int:
        """Return the bytes that the base's forward pass keeps, as in full training."""
        # Both settings include all gradients, so their difference is only the activations.
        some = replace(setting, alone=False, accumulates=True)
        none = replace(some, micro_batch_size=0)
        kept = self.base.memory_bytes(some) - self.base.memory_bytes(none)
        if setting.dtype == "bf16" and not setting.kernels:
            kept -= kept // 10  # a frozen norm does not keep the normed input
        if self.tokens and setting.kernels:
            # The head with trained rows has a chunk's logits and their gradient in fp32.
            kept += logits_tokens(self.vocab_size) * self.vocab_size * 12
        if self.is_dora:
            # DoRA keeps the output of each linear, which is multiplied by the norm's factor.
            tokens = setting.micro_batch_size * self.sequence_length
            kept += tokens * sum(each.outputs for each in self._adapted()) * setting.value_bytes()
        if self.has_dropout:
            # Dropout's mask for the input of each adapter takes one byte per element.
            tokens = setting.micro_batch_size * self.sequence_length
            kept += tokens * sum(each.inputs for each in self._adapted())
        return kept

    def weight_bytes(self, setting: RankSetting) -> int:
        """Return the bytes of all weights; the base's linears have the matmuls' dtype."""
        linears = sum(each.inputs * each.outputs for each in self.linears())
        others = self.num_params() - linears
        return linears * setting.value_bytes() + others * BYTES_PER_WEIGHT

    def gradient_sizes(self) -> tuple[GradientSize, ...]:
        """Return the trained parameters in the order in which the backward pass finishes them."""
        head = self.base.task_head_size()
        sizes = [GradientSize(head, "head")] if head else []
        sizes += [GradientSize(each, "matrix") for each in self._token_rows()[1:]]
        for each in reversed(self._adapted()):
            sizes += [GradientSize(each.outputs, "vector")] if self.is_dora else []
            sizes += [
                GradientSize(self.rank * each.outputs, "matrix"),
                GradientSize(self.rank * each.inputs, "matrix"),
            ]
        sizes += [
            GradientSize(self._adapter_size(each), "matrix")
            for each in reversed(self._adapted_parameters())
        ]
        sizes += [GradientSize(each, "embedding") for each in self._token_rows()[:1]]
        return tuple(sizes)

    def num_saved_params(self) -> int:
        """Return the number of the adapter's weights; a checkpoint does not contain the base."""
        return self.num_trainable_params()

    def summary(self) -> str:
        """Return a description of the base's sizes and the adapter."""
        trained = self.num_trainable_params()
        share = trained / max(1, self.num_params())
        beside = " on 4-bit linears" if self.is_quantized else ""
        kind = "DoRA" if self.is_dora else "LoRA"
        tokens = f", with the rows of {len(self.tokens)} tokens" if self.tokens else ""
        experts = self.frozen_experts()
        frozen = f"; {experts:,} parameters of experts stay frozen" if experts else ""
        return (
            f"{self.base.summary()}; {kind} of rank {self.rank} trains {trained:,} of them "
            f"({share:.2%}){beside}{tokens}{frozen}"
        )

    def frozen_experts(self) -> int:
        """Return the number of weights in experts without an adapter."""
        adapted = [each for each in self._adapted() if each.is_expert]
        stacks = [each for each in self._adapted_parameters() if each.is_expert]
        linears = sum(each.inputs * each.outputs for each in adapted)
        return self.expert_params() - linears - sum(each.elements() for each in stacks)

    def note(self) -> str | None:
        """Return how to adapt experts that stay frozen, or the base's note."""
        adapted = self._adapted_parameters()
        stacks = [
            each
            for each in self.parameters_beside_linears()
            if each.is_expert and each not in adapted
        ]
        if not stacks:
            return self.base.note()
        target = ALL_LINEAR if self.targets is None else ",".join(self.targets)
        names = ",".join(sorted(_short(stacks)))
        return (
            f"the adapter leaves {self.frozen_experts():,} parameters of experts frozen. To adapt "
            f'them, set adapter.target = "{target},{names}"'
        )

    def _adapted(self) -> list[LinearSize]:
        return [each for each in self.linears() if is_target(each.name, self.targets)]

    def _adapted_parameters(self) -> list[ParameterSize]:
        return _chosen(self.targets, self.base)

    def _token_rows(self) -> list[int]:
        """Return the number of weights in the trained rows of each matrix.

        The matrices are the embedding and, if it is separate, the output head.
        """
        if not self.tokens:
            return []
        return [len(self.tokens) * self.width()] * (1 if self.is_tied() else 2)

    def _adapter_size(self, parameter: ParameterSize) -> int:
        return self.rank * parameter.stack * (parameter.inputs + parameter.outputs)


def _chosen(names: tuple[str, ...] | None, base: ModelSpec) -> list[ParameterSize]:
    """Return the parameters with an adapter that do not belong to a linear."""
    others = base.parameters_beside_linears()
    linears = (each.name for each in base.linears())
    chosen = parameter_names(names, linears, (each.name for each in others))
    return [each for each in others if is_parameter_target(each.name, chosen)]


def _short(parameters: Iterable[ParameterSize]) -> set[str]:
    return {_last_two(each.name) for each in parameters}


def _last_two(path: str) -> str:
    return ".".join(path.split(".")[-2:])
