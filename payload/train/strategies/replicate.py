"""Data parallelism: every rank holds the full model, and the ranks exchange gradients."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from payload.config.launch_sections import DistributedSection
from payload.train.models.base import CausalLM
from payload.train.ranks.world import World
from payload.train.strategies.base import Strategy
from payload.train.strategies.gradients import GradientExchange


class Replicate(Strategy):
    """Data parallelism with an all-reduce of gradients in buckets during the backward pass."""

    def __init__(
        self,
        settings: DistributedSection,
        world: World,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Average over `group`, the ranks with the same part of a model; None = all ranks."""
        super().__init__(settings, world)
        self._exchange = GradientExchange(settings, world, group=group)

    def wrap(self, model: CausalLM) -> None:
        """Do nothing, because every rank has the whole model."""

    def attach(self, model: CausalLM) -> None:
        """Broadcast rank 0's weights, and register hooks that average the trainable gradients."""
        self._exchange.attach(model)

    def begin(self, tokens: Tensor) -> None:
        """Exchange the gradients of the next backward pass.

        `tokens` (B, T) are the tokens of that pass's micro-batch.
        """
        self._exchange.begin(tokens)

    def finish(self) -> float:
        """Set the mean gradients; return the seconds spent waiting."""
        return self._exchange.finish()
