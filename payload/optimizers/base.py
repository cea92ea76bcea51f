"""CONTRACT: the interface of an optimizer, from a plan's estimates to the update on the ranks.

An optimizer is one file of this package with a subclass of `Optimizer` and one instance,
`OPTIMIZER`. Plans and checks read an optimizer's costs and conflicts without torch. Only `build`
imports torch. In a checkpoint, the state of a parameter consists of tensors with the parameter's
shape and a 0-dimensional `step`. Other states need a `NamesState`. This project's kernels update
the parameters of torch's AdamW.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from payload.core.package_members import file_name

if TYPE_CHECKING:
    import torch

Split = Literal["matrices", "model"]
"""The split of a model over the ranks. `matrices`: each rank has a shard of each matrix. `model`:
tensor or pipeline parallelism."""


class Hyperparameters(Protocol):
    """The settings of [optimizer] that an update reads."""

    @property
    def lr(self) -> float:
        """Return the peak learning rate; the schedule sets the learning rate of each step."""

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
    """Matrices and embeddings, which get weight decay."""
    vectors: Sequence[torch.nn.Parameter]
    """Norms and biases, which get no weight decay."""


@runtime_checkable
class NamesState(Protocol):
    """An optimizer of torch that maps its state to the tensors of a checkpoint itself."""

    def named_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of a parameter's state, by name."""

    def set_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> bool:
        """Set a tensor of the parameter's state; return False if it does not fit."""


class Prepare(Protocol):
    """A function that returns the class to construct for a class of torch.optim."""

    def __call__(self, kind: type[torch.optim.Optimizer]) -> Any:
        """Return `kind`, or its equivalent that does not import torch's compiler."""


class Optimizer(ABC):
    """Updates the weights of a run."""

    state_bytes: ClassVar[int]
    """Bytes of state per trained weight, in memory and in a checkpoint; the largest number if
    weights differ."""
    update_s: ClassVar[float]
    """Seconds in which one core updates a weight, including clipping."""
    gpu_update_s: ClassVar[float]
    """Seconds in which a GPU updates a weight."""
    keeps_bf16_gradients: ClassVar[tuple[bool, bool]] = (False, False)
    """True for the gradients that may stay in bf16: of the layers' matrices, and of the head."""
    package: ClassVar[str | None] = None
    """Package that `build` imports, in addition to torch."""
    beside: ClassVar[Optimizer | None] = None
    """The optimizer of the remaining parameters; None = this optimizer trains all parameters."""

    @property
    def name(self) -> str:
        """Return the optimizer's name, which is also the name of its source file."""
        return file_name(self)

    def takes(self, *, is_layer_matrix: bool) -> bool:
        """Return whether this optimizer trains a parameter. Called only if `beside` is set."""
        del is_layer_matrix
        return True

    def conflict(self, setting: str, *, splits: Split) -> str | None:
        """Return why the optimizer conflicts with `setting`, a setting that splits weights; or
        None."""
        del setting, splits
        return None

    @abstractmethod
    def build(
        self, parameters: Parameters, settings: Hyperparameters, *, prepare: Prepare
    ) -> torch.optim.Optimizer:
        """Construct the optimizer of these parameters.

        Raises ConfigError if this torch lacks the optimizer.
        """
