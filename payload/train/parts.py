"""The parts that the training loop works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from payload.config.run_config import RunConfig
from payload.run_record.run_files import RunPaths
from payload.train.calibration import Calibration
from payload.train.checkpoints.checkpoint import BaseModel
from payload.train.models.base import CausalLM
from payload.train.optimizers.optimizer import Optimizers
from payload.train.rank_output_files import Heartbeat, MetricsFile
from payload.train.ranks.world import World
from payload.train.strategies.base import Strategy
from payload.train.tasks.base import Task


class Observer:
    """Follows one rank's run, for what measures it. This one notes nothing."""

    def before_model(self) -> None:
        """Note that the rank has its data, and no model yet."""

    def ready(self, parts: Parts) -> None:
        """Note that the rank has its model and its optimizer state, and begins to train."""

    def before_update(self, step: int) -> None:
        """Note that the gradients of the step after `step` are there, and its update is next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """State of one rank; every rank has its own."""

    config: RunConfig
    world: World
    paths: RunPaths
    task: Task
    calibration: Calibration
    accelerator: Accelerator
    model: CausalLM
    """The plain model: its parameters are the ones that `trained` trains."""
    trained: torch.nn.Module
    """The model as the engine and Accelerate's precision wrapped it."""
    optimizers: Optimizers
    strategy: Strategy
    tokenizer: Mapping[str, bytes]
    """Its files for the checkpoints, by name; on rank 0 only."""
    identity: str | None
    """The run's, for its checkpoints; on rank 0 only."""
    base: BaseModel | None
    """The base of an adapter; on rank 0 only."""
    metrics: MetricsFile | None
    """On rank 0 only."""
    heartbeat: Heartbeat
    stop_requested: Callable[[], bool]
    """Says whether this rank was asked to stop; one rank is enough, all stop together."""
    observer: Observer
