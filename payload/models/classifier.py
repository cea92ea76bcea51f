"""Sizes and costs of a classifier: a language model with an output head that has one row per
label."""

from __future__ import annotations

from dataclasses import dataclass

from payload.models.spec import GradientSize, ModelSpec, RankSetting, logits_tokens
from payload.models.wrapper_spec import WrappedSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSpec(WrappedSpec):
    """A language model with a linear layer from the width to the labels as output head."""

    num_labels: int

    @classmethod
    def of(cls, base: ModelSpec, *, num_labels: int) -> ClassifierSpec:
        """Return the spec of `base` as a classifier."""
        return cls(
            model_type=base.model_type,
            sequence_length=base.sequence_length,
            vocab_size=base.vocab_size,
            base=base,
            num_labels=num_labels,
        )

    def is_tied(self) -> bool:
        """Return True, because the model has no separate output head."""
        return True

    def head_rows(self) -> int:
        """Return the number of labels."""
        return self.num_labels

    def task_head_size(self) -> int:
        """Return the number of elements in the linear layer to the labels."""
        return self.num_labels * self.width()

    def num_params(self) -> int:
        """Return the number of all weights."""
        return self.base.num_params() - self._dropped() + self.task_head_size()

    def flops_per_token(self) -> int:
        """Return the floating-point operations of forward and backward for one token.

        The linear layer to the labels reads only one token of a text and is not counted.
        """
        return self.base.flops_per_token() - 6 * self.embedding_size()

    def matmul_size(self) -> int:
        """Return the number of weights in the matmuls, including the linear layer to the labels."""
        return self.base.matmul_size() - self.embedding_size() + self.task_head_size()

    def memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory: the memory of the base without logits."""
        whole = self.base.memory_bytes(setting)
        tokens = setting.micro_batch_size * self.sequence_length
        size = setting.value_bytes()
        if setting.kernels:
            logits = min(tokens, logits_tokens(self.vocab_size)) * size * self.vocab_size
        else:
            logits = setting.plain_logits_bytes(self.vocab_size, tokens=tokens)
        return whole - logits - self._dropped() * setting.trained_bytes()

    def gradient_sizes(self) -> tuple[GradientSize, ...]:
        """Return the parameters in the order in which the backward pass finishes them."""
        rest = [each for each in self.base.gradient_sizes() if each.kind != "head"]
        return (GradientSize(self.task_head_size(), "head"), *rest)

    def summary(self) -> str:
        """Return a description of the model's sizes."""
        return f"{self.base.summary()}; classifies into {self.num_labels} labels"

    def _dropped(self) -> int:
        """Return the number of elements in a separate output head, which a classifier drops."""
        return 0 if self.base.is_tied() else self.embedding_size()
