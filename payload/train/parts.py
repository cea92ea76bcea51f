"""Everything that the training loop works with on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from payload.config.run_config import RunConfig
from payload.run_record.run_files import RunPaths
from payload.train.checkpoints.checkpoint import BaseModel
from payload.train.gemm_and_network_benchmark import Calibration
from payload.train.models.base import CausalLM
from payload.train.optimizers.optimizer import Optimizers
from payload.train.rank_metrics_and_heartbeat import Heartbeat, MetricsFile
from payload.train.ranks.world import World
from payload.train.strategies.base import Strategy
from payload.train.tasks.base import Task
from payload.train.tensors.copied_parts import CopiedParts


class Observer:
    """Receives the progress of one rank's run, for measurements. This base class ignores the
    progress."""

    def before_model(self) -> None:
        """Called when the data is open, before the model is built."""

    def ready(self, context: TrainContext) -> None:
        """Called when model and optimizer state are complete, before training."""

    def before_update(self, step: int) -> None:
        """Called when the gradients are complete, before the update.

        `step` is the number of earlier updates.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainContext:
    """The state of this rank that the training loop uses."""

    config: RunConfig
    world: World
    paths: RunPaths
    task: Task
    calibration: Calibration
    accelerator: Accelerator
    model: CausalLM
    """The unwrapped model, with the same parameters as `trained`."""
    trained: torch.nn.Module
    """The model wrapped by the engine, and by Accelerate for mixed precision."""
    optimizers: Optimizers
    strategy: Strategy
    tokenizer: Mapping[str, bytes]
    """The tokenizer's files for the checkpoints, by name; on rank 0 only."""
    copied: CopiedParts | None
    """The untrained parts of a multimodal model for the checkpoints; on rank 0 only."""
    identity: str | None
    """The run's identity, for its checkpoints; on rank 0 only."""
    base: BaseModel | None
    """The base model of an adapter; on rank 0 only."""
    metrics: MetricsFile | None
    """The run's metrics.jsonl; on rank 0 only."""
    heartbeat: Heartbeat
    stop_requested: Callable[[], bool]
    """Returns True after a request to stop this rank; one request stops all ranks."""
    observer: Observer
