"""The seam between the training loop and how one model lives on many ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from payload.config.launch_sections import DistributedSection
from payload.config.run_config import RunConfig
from payload.core.dtype import Dtype
from payload.train.checkpoints.snapshot import Snapshot
from payload.train.models.base import CausalLM
from payload.train.models.stage import Stage
from payload.train.optimizers.optimizer import Optimizers, build_optimizers
from payload.train.ranks.world import World
from payload.train.strategies.sync_check import require_sound_ranks
from payload.train.tensors.lazy_tensors import LazyTensors, Part


class Strategy(ABC):
    """One rank's side of a strategy, for one model.

    The calls come in this order: `wrap`, `optimizers`, `attach`; then for each step `begin`
    and `finish`.
    """

    def __init__(self, settings: DistributedSection, world: World) -> None:
        self.settings = settings
        self.world = world
        self.mesh = settings.mesh(world.world_size)
        self.data_rank = self.mesh.data_rank(world.rank)
        """Which of the mesh's `data_ranks` parts of each batch this rank trains on."""

    def has_results(self) -> bool:
        """Say whether losses of this rank count: of each data rank's, one rank's do."""
        return True

    def stage(self) -> Stage | None:
        """Return this rank's pipeline stage, or None where a rank computes whole passes."""
        return None

    def holds(self, name: str) -> bool:
        """Say whether this rank has the parameter `name`, or a part of it."""
        del name
        return True

    @abstractmethod
    def wrap(self, model: CausalLM) -> None:
        """Place the model on the ranks, before optimizers and kernels are made for it."""

    def place(self, model: CausalLM) -> None:
        """Leave this rank what it is to hold of a model that its data ranks have alike.

        For a strategy within another one, in the place of `wrap`.
        """
        del model

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight as this rank computes with it, one at a time."""
        return model.named_parameters()

    def held(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what this rank has of each weight, by name."""
        return dict(model.named_parameters())

    def parts(self, model: CausalLM) -> dict[str, nn.Parameter] | None:
        """Return what this rank's optimizers train, by name; None = the model's own parameters."""
        del model
        return None

    def optimizers(self, model: CausalLM, config: RunConfig, *, dtype: Dtype) -> Optimizers:
        """Make what updates this rank's parameters; passes compute in `dtype`."""
        del dtype
        made = build_optimizers(model, config.optimizer, config.engine, parts=self.parts(model))
        made.norm_over_ranks, made.counts = self.norm_over_ranks(), self.counts()
        return made

    @abstractmethod
    def attach(self, model: CausalLM) -> None:
        """Have every rank train rank 0's weights; the model has its kernels by now, if any."""

    @abstractmethod
    def begin(self, tokens: Tensor) -> None:
        """Take the coming backward pass as the last one of its step; it read `tokens` (B, T)."""

    @abstractmethod
    def finish(self) -> float:
        """Put the mean gradients of all ranks in place; return the seconds that this waited.

        A parameter that no pass of the step used has a gradient of zeros. Raises RuntimeError when
        another rank vanished.
        """

    def holds_parts(self) -> bool:
        """Say whether a rank holds parts of the model, of which it reads its own alone."""
        return False

    def own_rows(self, num_rows: int) -> tuple[int, int]:
        """Return where this rank's rows of so many begin and end: all of them."""
        return 0, num_rows

    def own_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor that belongs to the parameter `name`."""
        del name
        start, end = self.own_rows(len(tensor))
        return tensor[start:end]

    def read_part(self, tensors: LazyTensors, stored: str, *, name: str) -> Tensor:
        """Read this rank's part of the tensor `stored`, which belongs to the parameter `name`."""
        del name
        num_rows, *others = tensors.shape(stored)
        start, end = self.own_rows(num_rows)
        part = torch.empty((end - start, *others), dtype=tensors.dtype(stored))
        tensors.copy_to(stored, part, Part(dim=0, first=start))
        return part

    def counts(self) -> Callable[[str], bool] | None:
        """Return what says whether a parameter's gradient is in the norm of this rank's part.

        Of ranks with the same gradient, one counts it. None = all are.
        """
        return None

    def norm_over_ranks(self) -> Callable[[float], float] | None:
        """Return what makes the norm of all gradients from that of this rank's part.

        None where each rank has all of them.
        """
        return None

    def without_gradients(self, model: CausalLM) -> AbstractContextManager[object]:
        """Return the context in which an evaluation of the model computes."""
        return torch.inference_mode() if model.takes_inference_mode else torch.no_grad()

    def computes_together(self) -> bool:
        """Say whether a rank can make a pass only while all others make one, too."""
        return False

    def check(self, optimizers: Optimizers, *, step: int, passed_step: int | None) -> None:
        """Raise RanksDifferError or TrainingError, on every rank, unless the ranks hold one model.

        `passed_step` is the last step after which the check passed.
        """
        require_sound_ranks(optimizers, self.world, step=step, passed_step=passed_step)

    def snapshot(self, model: CausalLM, optimizers: Optimizers) -> Snapshot:
        """Return the tensors of a checkpoint; all ranks ask for it after the same step."""
        return Snapshot.of(model, optimizers.state_tensors())
