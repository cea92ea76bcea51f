"""The tensors of a checkpoint, as held by one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from payload.train.models.base import CausalLM
from payload.train.models.lora import adapter_tensors


@dataclass(frozen=True)
class Snapshot:
    """The tensors that a checkpoint is written from, on a rank that has the whole model."""

    weights: Mapping[str, Tensor]
    """The weights of the model or its adapter, by their names in the checkpoint."""
    optimizer: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: CausalLM, optimizer: Mapping[str, Tensor]) -> Self:
        """Return the snapshot of a model, or only of its adapter if the model has one."""
        return cls(checkpoint_weights(model), optimizer)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return one of the tensors with all its elements, on rank 0.

        Rank 0 calls this method for each tensor of `weights`, in the order of the file. Afterwards,
        rank 0 calls it for each tensor of `optimizer`.
        """
        return tensor

    def is_shared(self) -> bool:
        """Return whether rank 0 needs the other ranks to write the checkpoint."""
        return False

    def finish(self) -> None:
        """Take part in the remaining communication that other ranks wait for."""


def checkpoint_weights(model: CausalLM) -> dict[str, Tensor]:
    """Return the weights that a checkpoint stores: the adapter's, or all if there is no adapter."""
    return model.hf_tensors() if model.adapter is None else adapter_tensors(model)
