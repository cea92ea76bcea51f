"""The results of a step, equal on all ranks, which a GPU has only once it has computed the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from payload.train.ranks.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResults:
    """The results of one step, from all ranks."""

    loss: float
    """Sum of the ranks' losses."""
    gradient_norm: float
    """Norm of the gradients before clipping."""
    stop_requests: float
    """Number of ranks with a request to stop."""
    seconds: list[float]
    """All ranks' seconds in each part of the step (see `StepClock.take`)."""
    loss_sums: Tensor
    """The sums that the loss's `step_row` reads, float64."""
    expert_tokens: Tensor
    """Tokens of each expert, float64; empty without experts."""


def begin_results(
    world: World,
    *,
    loss: Tensor,
    gradient_norm: Tensor,
    stop_requested: bool,
    seconds: Sequence[float],
    loss_sums: Tensor,
    expert_tokens: Tensor,
) -> Callable[[], StepResults]:
    """Begin to sum the ranks' results; return a function that waits for them.

    `loss` is a float64 scalar on the rank's device; `loss_sums` and `expert_tokens` are float64
    vectors on the host. On a GPU, neither this function nor the returned one waits for work that is
    queued later.
    """
    own = torch.tensor([float(stop_requested), *seconds], dtype=torch.float64)
    hosted = torch.cat((own, loss_sums, expert_tokens))
    summed = world.sum(torch.cat((loss.view(1), world.send(hosted))))
    norm = gradient_norm.to(summed).view(1)
    read = world.begin_read(torch.cat((norm, summed)))
    lengths = [1, 1, 1, len(seconds), len(loss_sums), len(expert_tokens)]

    def finished() -> StepResults:
        norm, total, requests, times, sums, experts = torch.split(read(), lengths)
        return StepResults(
            loss=float(total),
            gradient_norm=float(norm),
            stop_requests=float(requests),
            seconds=times.tolist(),
            loss_sums=sums,
            expert_tokens=experts,
        )

    return finished
