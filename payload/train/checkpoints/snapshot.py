"""The tensors of a checkpoint, as one rank holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from payload.train.models.base import CausalLM
from payload.train.models.lora import adapter_tensors


@dataclass(frozen=True)
class Snapshot:
    """The tensors that one checkpoint is written from; here of a rank that holds all of it."""

    weights: Mapping[str, Tensor]
    """The model's or its adapter's, under the names of the checkpoint's file."""
    optimizer: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: CausalLM, optimizer: Mapping[str, Tensor]) -> Self:
        """Return the snapshot of a model: of its adapter alone where it trains one."""
        return cls(checkpoint_weights(model), optimizer)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return one of the tensors with all its elements, on rank 0.

        Rank 0 asks for `weights` in the order of the file, then for `optimizer` likewise.
        """
        return tensor

    def is_shared(self) -> bool:
        """Say whether rank 0 needs the other ranks to write the checkpoint."""
        return False

    def finish(self) -> None:
        """Do this rank's part of what was not asked for, which other ranks wait for."""


def checkpoint_weights(model: CausalLM) -> dict[str, Tensor]:
    """Return the weights that a checkpoint has: the adapter's alone where one is trained."""
    return model.hf_tensors() if model.adapter is None else adapter_tensors(model)
