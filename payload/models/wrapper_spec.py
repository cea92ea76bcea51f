"""Sizes and costs of a model that wraps a base model: with an adapter, or as a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from payload.models.spec import LinearSize, ModelSpec, ParameterSize


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedSpec(ModelSpec):
    """A model that has the layers of `base`."""

    base: ModelSpec

    def config_read(self) -> Mapping[str, Any]:
        """Return the base's config.json."""
        return self.base.config_read()

    def context(self) -> int:
        """Return the longest context of the base in tokens."""
        return self.base.context()

    def num_layers(self) -> int:
        """Return the base's number of layers."""
        return self.base.num_layers()

    def num_heads(self) -> int:
        """Return the base's number of attention heads."""
        return self.base.num_heads()

    def width(self) -> int:
        """Return the width of the base's residual stream."""
        return self.base.width()

    def is_tied(self) -> bool:
        """Return whether the base's output head is its token embedding."""
        return self.base.is_tied()

    def linears(self) -> tuple[LinearSize, ...]:
        """Return the base's linears."""
        return self.base.linears()

    def parameters_beside_linears(self) -> tuple[ParameterSize, ...]:
        """Return the base's parameters outside the linears that an adapter can target."""
        return self.base.parameters_beside_linears()

    def expert_params(self) -> int:
        """Return the number of weights in the base's experts."""
        return self.base.expert_params()

    def has_known_modules(self) -> bool:
        """Return whether the names of the base's modules are known."""
        return self.base.has_known_modules()

    def why_not_quantized(self) -> str | None:
        """Return why the base's linears cannot have 4 bits, or None if they can."""
        return self.base.why_not_quantized()

    def settings(self) -> dict[str, int | bool]:
        """Return the base's sizes as settings of the run config's [model] section."""
        return self.base.settings()

    def with_vocab_size(self, rows: int) -> Self:
        """Return the same model with `rows` rows in the base's embedding."""
        return replace(self, vocab_size=rows, base=self.base.with_vocab_size(rows))

    def with_sequence_length(self, tokens: int) -> Self:
        """Return the same model, trained on sequences of up to `tokens`."""
        base = self.base.with_sequence_length(tokens)
        return replace(self, sequence_length=tokens, base=base)
