"""The interface between the training loop and a model distributed over ranks."""

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
from payload.train.strategies.sync_check import require_equal_ranks
from payload.train.tensors.lazy_tensors import LazyTensors, Part


class Strategy(ABC):
    """The work of one rank in a distribution strategy, for one model.

    The methods are called in this order: `wrap`, `optimizers`, `attach`, and `begin` and `finish`
    in each step.
    """

    def __init__(self, settings: DistributedSection, world: World) -> None:
        self.settings = settings
        self.world = world
        self.mesh = settings.mesh(world.world_size)
        self.data_rank = self.mesh.data_rank(world.rank)
        """Index of this rank's part of each batch; a batch is divided into `mesh.data_ranks`
        parts."""

    def has_results(self) -> bool:
        """Return whether this rank's losses count.

        Of ranks with the same data, one rank's losses count.
        """
        return True

    def stage(self) -> Stage | None:
        """Return this rank's pipeline stage, or None if a rank computes all layers."""
        return None

    def holds(self, name: str) -> bool:
        """Return whether this rank has the parameter `name`, or a part of it."""
        del name
        return True

    @abstractmethod
    def wrap(self, model: CausalLM) -> None:
        """Distribute the model to the ranks, before the model's optimizers and kernels are
        created."""

    def place(self, model: CausalLM) -> None:
        """Keep only this rank's shard of a model.

        Before the call, all data ranks hold equal weights.

        An enclosing strategy (`ModelParallel`) calls this instead of `wrap`.
        """
        del model

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the full weights with which this rank computes, one at a time."""
        return model.named_parameters()

    def local_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return this rank's part of each weight, by name."""
        return dict(model.named_parameters())

    def parts(self, model: CausalLM) -> dict[str, nn.Parameter] | None:
        """Return the parameters of this rank's optimizers, by name; None = the model's own."""
        del model
        return None

    def optimizers(self, model: CausalLM, config: RunConfig, *, dtype: Dtype) -> Optimizers:
        """Create the optimizers of this rank's parameters; the model computes in `dtype`."""
        del dtype
        made = build_optimizers(model, config.optimizer, config.engine, parts=self.parts(model))
        made.norm_over_ranks, made.counts = self.norm_over_ranks(), self.counts()
        return made

    @abstractmethod
    def attach(self, model: CausalLM) -> None:
        """Set rank 0's weights on every rank; call this after the model's kernels are set."""

    @abstractmethod
    def begin(self, tokens: Tensor) -> None:
        """Prepare for a step's last backward pass.

        `tokens` (B, T) are the tokens of that pass's micro-batch.
        """

    @abstractmethod
    def finish(self) -> float:
        """Set the mean gradients of all ranks; return the seconds spent waiting.

        A parameter that no micro-batch used gets a gradient of zeros. Raises RuntimeError if a
        different rank has disappeared.
        """

    def holds_parts(self) -> bool:
        """Return True if each rank holds only a part of the model and reads only this part."""
        return False

    def own_rows(self, num_rows: int) -> tuple[int, int]:
        """Return the (begin, end) of this rank's share of `num_rows` rows; by default all rows."""
        return 0, num_rows

    def own_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a full tensor that belongs to the parameter `name`."""
        del name
        start, end = self.own_rows(len(tensor))
        return tensor[start:end]

    def read_part(self, tensors: LazyTensors, stored: str, *, name: str) -> Tensor:
        """Read this rank's part of the parameter `name`.

        `stored` is the tensor's name in the files.
        """
        del name
        num_rows, *others = tensors.shape(stored)
        start, end = self.own_rows(num_rows)
        part = torch.empty((end - start, *others), dtype=tensors.dtype(stored))
        tensors.copy_to(stored, part, Part(dim=0, first=start))
        return part

    def counts(self) -> Callable[[str], bool] | None:
        """Return a function that returns whether a parameter counts in this rank's gradient norm.

        If several ranks hold the same gradient, only one of them counts it. None = all parameters
        count.
        """
        return None

    def norm_over_ranks(self) -> Callable[[float], float] | None:
        """Return a function that maps this rank's gradient norm to the norm over all ranks.

        Return None if each rank has all gradients.
        """
        return None

    def without_gradients(self, model: CausalLM) -> AbstractContextManager[object]:
        """Return the context in which the model is evaluated."""
        return torch.inference_mode() if model.takes_inference_mode else torch.no_grad()

    def computes_together(self) -> bool:
        """Return True if a rank can run a micro-batch only while all other ranks run one."""
        return False

    def check(self, optimizers: Optimizers, *, step: int, passed_step: int | None) -> None:
        """Check that all ranks hold the same model.

        Raises RanksDifferError, TrainingError on every rank.

        `passed_step` is the last step after which the check passed.
        """
        require_equal_ranks(optimizers, self.world, step=step, passed_step=passed_step)

    def snapshot(self, model: CausalLM, optimizers: Optimizers) -> Snapshot:
        """Return the tensors of a checkpoint; all ranks call this after the same step."""
        return Snapshot.of(model, optimizers.state_tensors())
