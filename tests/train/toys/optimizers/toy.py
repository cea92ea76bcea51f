"""Gradient descent with momentum: all that a new optimizer needs to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from payload.optimizers.base import Hyperparameters, Optimizer, Parameters, Prepare, Split

if TYPE_CHECKING:
    import torch


class Toy(Optimizer):
    """torch's SGD."""

    state_bytes = 4  # The momentum in fp32.
    update_s = 1e-9
    gpu_update_s = 1e-11

    def conflict(self, setting: str, *, splits: Split) -> str | None:
        """Return that it was not tried on a part of a matrix."""
        if splits == "model":
            return None
        return f'optimizer.name = "{self.name}" was not tried with {setting}. Use adamw.'

    def build(
        self, parameters: Parameters, settings: Hyperparameters, *, prepare: Prepare
    ) -> torch.optim.Optimizer:
        """Construct it with the first moment's decay as its momentum."""
        import torch

        trained = [*parameters.matrices, *parameters.vectors]
        made: torch.optim.Optimizer = prepare(torch.optim.SGD)(
            trained, lr=settings.lr, momentum=settings.beta1
        )
        return made


OPTIMIZER = Toy()
