"""LoRA's numbers: which linears an adapter goes on, what is trained, and what that costs.

LoRA: https://arxiv.org/abs/2106.09685. rsLoRA's scale: https://arxiv.org/abs/2312.03732.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from payload.errors import ConfigError
from payload.models.spec import (
    BYTES_PER_TRAINABLE,
    BYTES_PER_WEIGHT,
    PROCESS_BYTES,
    GradientSize,
    LinearSize,
    ModelSpec,
    RankSetting,
    logits_tokens,
)
from payload.models.wrapped import BYTES_PER_TRAINED, WrappedSpec

ALL_LINEAR = "all-linear"
"""Every linear of the layers; the output head is none of them, as in PEFT."""


def target_names(target: str) -> tuple[str, ...] | None:
    """Return the module names in a comma-separated `adapter.target`; None means all linears.

    Raises ConfigError for a target without a name.
    """
    if target.strip() == ALL_LINEAR:
        return None
    names = tuple(name.strip() for name in target.split(","))
    if not all(names):
        raise ConfigError(
            f"adapter.target = {target!r}: a name is empty. Use {ALL_LINEAR!r} or names of linears "
            "with commas between, as in 'q_proj,v_proj'."
        )
    return names


def is_target(module: str, names: tuple[str, ...] | None) -> bool:
    """Say whether the linear `module`, a dotted path, gets an adapter; as PEFT matches names."""
    return names is None or any(module == name or module.endswith(f".{name}") for name in names)


def scale(*, rank: int, alpha: float, rslora: bool) -> float:
    """Return what the adapter's output is multiplied by."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedSpec(WrappedSpec):
    """A frozen base with an adapter on some of its linears."""

    rank: int
    targets: tuple[str, ...] | None
    """Names of linears; None = all."""

    @classmethod
    def of(cls, base: ModelSpec, *, rank: int, target: str) -> AdaptedSpec:
        """Return the spec of `base` with an adapter. Raises ConfigError for an unknown target."""
        names = target_names(target)
        known = base.linears()
        for name in names or ():
            if known and not any(is_target(each.name, (name,)) for each in known):
                choices = sorted({each.name.rpartition(".")[2] for each in known})
                raise ConfigError(
                    f"adapter.target = {target!r}: the model has no linear {name!r}. Use "
                    f"{ALL_LINEAR!r} or some of {', '.join(choices)}."
                )
        return cls(
            model_type=base.model_type,
            sequence_length=base.sequence_length,
            vocab_size=base.vocab_size,
            base=base,
            rank=rank,
            targets=names,
        )

    def num_params(self) -> int:
        """Return the number of the base's weights and the adapter's."""
        trained_beside = self.base.task_head_size()
        return self.base.num_params() - trained_beside + self.num_trainable_params()

    def num_trainable_params(self) -> int:
        """Return the number of the adapter's weights."""
        adapter = sum(self.rank * (each.inputs + each.outputs) for each in self._adapted())
        return adapter + self.base.task_head_size()

    def flops_per_token(self) -> int:
        """Return the floating-point operations of forward and backward for one token.

        The base's weights have no gradient: 4 instead of 6 per parameter that multiplies.
        """
        head = self.base.head_rows() * self.width() - self.base.task_head_size()
        frozen = sum(each.inputs * each.outputs for each in self.linears()) + head
        trained = self.num_trainable_params() - self.base.task_head_size()
        return self.base.flops_per_token() - 2 * frozen + 6 * trained

    def memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory.

        The base's linears are in the dtype of the matmuls and have neither gradients nor optimizer
        state. The layers run without kernels; the head's chunks need them.
        """
        whole = self.base.memory_bytes(
            replace(setting, kernels=False, alone=False, accumulates=True)
        )
        activations = whole - PROCESS_BYTES - self.base.num_params() * BYTES_PER_TRAINED
        size = setting.value_bytes()
        if setting.kernels:
            tokens = setting.micro_batch_size * self.sequence_length
            rows = self.base.head_rows()
            activations -= tokens * rows * 16
            activations += min(tokens, logits_tokens(rows)) * rows * size
            activations += rows * self.width() * size
        linears = sum(each.inputs * each.outputs for each in self.linears())
        held = linears * size + (self.base.num_params() - linears) * BYTES_PER_WEIGHT
        trained = self.num_trainable_params() * BYTES_PER_TRAINED
        return PROCESS_BYTES + held + trained + max(0, activations)

    def gradient_sizes(self) -> tuple[GradientSize, ...]:
        """Return the adapter's matrices in the order in which the backward pass finishes them."""
        head = self.base.task_head_size()
        sizes = [GradientSize(head, "head")] if head else []
        for each in reversed(self._adapted()):
            sizes += [
                GradientSize(self.rank * each.outputs, "matrix"),
                GradientSize(self.rank * each.inputs, "matrix"),
            ]
        return tuple(sizes)

    def checkpoint_bytes(self) -> int:
        """Return what a checkpoint takes on disk: the adapter and its optimizer state alone."""
        return self.num_trainable_params() * (BYTES_PER_WEIGHT + BYTES_PER_TRAINABLE)

    def summary(self) -> str:
        """Describe the base's sizes and the adapter in words."""
        trained = self.num_trainable_params()
        share = trained / max(1, self.num_params())
        return (
            f"{self.base.summary()}; LoRA of rank {self.rank} trains {trained:,} of them "
            f"({share:.2%})"
        )

    def _adapted(self) -> list[LinearSize]:
        return [each for each in self.linears() if is_target(each.name, self.targets)]
