"""CONTRACT: the interface of an optimizer, from a plan's numbers to the update on the ranks.

An optimizer is one file of this package with a class below `Optimizer` and its only object,
`OPTIMIZER`. Plans and checks read its numbers and conflicts without torch, which `build` alone
imports. Its state in a checkpoint is tensors of the parameter's shape, and a 0-d `step`. Our
kernels update what torch's AdamW trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from payload.core.members import file_name

if TYPE_CHECKING:
    import torch

Split = Literal["matrices", "model"]
"""A part of each matrix on each rank; or of each layer, or some of the layers."""


class Hyperparameters(Protocol):
    """The settings of [optimizer] that an update reads."""

    @property
    def lr(self) -> float:
        """Return the highest learning rate; the schedule sets that of each step."""

    @property
    def weight_decay(self) -> float:
        """Return the weight decay of matrices and embeddings."""

    @property
    def beta1(self) -> float:
        """Return the decay of the first moment."""

    @property
    def beta2(self) -> float:
        """Return the decay of the second moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters that one optimizer trains."""

    matrices: Sequence[torch.nn.Parameter]
    """Matrices and embeddings, which decay."""
    vectors: Sequence[torch.nn.Parameter]
    """Norms and biases, which do not."""


class Prepare(Protocol):
    """Makes the class to construct from a class of torch.optim."""

    def __call__(self, kind: type[torch.optim.Optimizer]) -> Any:
        """Return `kind`, or its equal that does not load torch's compiler."""


class Optimizer(ABC):
    """Updates the weights of a run."""

    state_bytes: ClassVar[int]
    """Bytes of state of a trained weight, in memory and in a checkpoint; the most where weights
    differ."""
    update_s: ClassVar[float]
    """Time in which one core updates a weight, clipping included."""
    gpu_update_s: ClassVar[float]
    """Time in which a GPU does."""
    beside: ClassVar[Optimizer | None] = None
    """Trains the parameters that this one does not take; None = it takes all."""

    @property
    def name(self) -> str:
        """Return the name of its file."""
        return file_name(self)

    def takes(self, *, is_layer_matrix: bool) -> bool:
        """Return whether it trains a parameter, where it has an optimizer beside it."""
        del is_layer_matrix
        return True

    def conflict(self, setting: str, *, splits: Split) -> str | None:
        """Return why it does not run with `setting`, which splits weights, and the fix; or None."""
        del setting, splits
        return None

    @abstractmethod
    def build(
        self, parameters: Parameters, settings: Hyperparameters, *, prepare: Prepare
    ) -> torch.optim.Optimizer:
        """Construct the optimizer of these parameters.

        Raises ConfigError where this torch has no such optimizer.
        """
