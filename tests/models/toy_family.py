"""A model family that predicts the next token from the last one: the minimum of a new family.

As a program it trains on ranks like tests.support.several_runs, with the family in the registry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn

from payload.models import registry
from payload.models.family import Family
from payload.models.spec import GradientSize, ModelSpec, RankSetting
from payload.train.models.base import Cache, CausalLM
from payload.train.models.hf_layout import load_named
from tests.support import several_runs

LINE = {"toy": "tests.models.toy_family"}
"""The registry's line for the family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToySpec(ModelSpec):
    """An embedding, a matrix and a head."""

    hidden: int

    def context(self) -> int:
        return 4096

    def num_layers(self) -> int:
        return 1

    def num_heads(self) -> int:
        return 1

    def width(self) -> int:
        return self.hidden

    def is_tied(self) -> bool:
        return False

    def flops_per_token(self) -> int:
        return 6 * (self.embedding_size() + self.hidden**2)

    def memory_bytes(self, setting: RankSetting) -> int:
        return 16 * self.num_params()

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "embed.weight", (self.vocab_size, self.hidden)
        yield "mix.weight", (self.hidden, self.hidden)
        yield "head.weight", (self.vocab_size, self.hidden)

    def gradient_sizes(self) -> tuple[GradientSize, ...]:
        outer, inner = self.embedding_size(), GradientSize(self.hidden**2, "matrix")
        return GradientSize(outer, "head"), inner, GradientSize(outer, "embedding")


class Toy(CausalLM):
    """The toy model."""

    spec: ToySpec

    def __init__(self, spec: ToySpec, *, dropout: float) -> None:
        super().__init__(spec, dropout=dropout)
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden)
        self.mix = nn.Linear(spec.hidden, spec.hidden, bias=False)
        self.head = nn.Linear(spec.hidden, spec.vocab_size, bias=False)

    def hidden(
        self, tokens: Tensor, caches: Sequence[Any] | None = None, starts: Tensor | None = None
    ) -> Tensor:
        return torch.tanh(self.mix(self.embed(tokens)))

    def head_weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.head.weight)

    def new_caches(self) -> Sequence[Cache]:
        return []

    def is_hidden_matrix(self, name: str) -> bool:
        return name == "mix.weight"

    def hf_config(self) -> dict[str, Any]:
        sizes = {"hidden": self.spec.hidden, "vocab_size": self.spec.vocab_size}
        return {"model_type": "toy", **sizes}

    def load_tensors(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        load_named(dict(self.named_parameters()), tensors, unused=(), where=where)


def build(spec: ToySpec, *, dropout: float, random: bool) -> Toy:
    return Toy(spec, dropout=dropout)


class ToyFamily(Family):
    """Reads the spec from config.json, and names the module with the layers."""

    model_types = ("toy",)
    tensors = LINE["toy"]

    def read(self, raw: Mapping[str, Any], *, where: str) -> ToySpec:
        sizes = {"hidden": raw["hidden"], "vocab_size": raw["vocab_size"]}
        return ToySpec(model_type="toy", sequence_length=4096, **sizes)


FAMILY = ToyFamily()

if __name__ == "__main__":
    with mock.patch.dict(registry.FAMILIES, LINE):
        several_runs.main()
