"""Evaluation of a validation set, shared by all ranks and summed exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from payload.data.reading.blocks import Blocks, Indices
from payload.run_record.metrics_log import EvalMetrics
from payload.train.losses.base import Loss
from payload.train.models.base import CausalLM
from payload.train.ranks.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPass:
    """Settings of an evaluation."""

    world: World
    step: int
    micro_batch_size: int
    max_tokens: int | None
    """Evaluate the first samples that hold this many tokens; None = all."""
    autocast: Callable[[], AbstractContextManager[None]]
    should_stop: Callable[[int, int], bool]
    """Asked after every pass, with the number done and of all; the answer is the same on all
    ranks."""
    without_gradients: Callable[[], AbstractContextManager[object]] = torch.inference_mode
    """The context that a pass computes in, besides `autocast`."""
    computes_together: bool = False
    """A rank can make a pass only while all others make one: those with nothing to do repeat
    another pass's work and drop the result."""
    share: tuple[int, int] | None = None
    """Which part of the samples this rank evaluates, and of how many; None = one for each rank."""
    has_results: bool = True
    """True on the one of the ranks with the same samples that adds its losses to the sum."""

    def part(self) -> tuple[int, int]:
        """Return which part of the samples this rank evaluates, and of how many."""
        return (self.world.rank, self.world.world_size) if self.share is None else self.share

    def sum(self, values: Tensor) -> None:
        """Add up what the ranks found, in place."""
        if not self.has_results:
            values.zero_()
        self.world.sum(values)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Enter what a pass computes in."""
        with self.without_gradients(), self.autocast():
            yield


def evaluate(model: CausalLM, blocks: Blocks, how: EvalPass, loss: Loss) -> EvalMetrics | None:
    """Return the loss over the first validation tokens, or all of them.

    Sums are added up in float64, so that the number of ranks does not weigh on the result. None
    when it was asked to stop.
    """
    size, num_blocks = how.micro_batch_size, blocks.num_blocks()
    index, parts = how.part()
    if how.max_tokens is not None:
        num_blocks = min(num_blocks, -(-how.max_tokens // blocks.sequence_length))
    mine = np.arange(index, num_blocks, parts, dtype=np.int64)
    total = torch.zeros(2, dtype=torch.float64)
    stopped = False

    def sums(chosen: Indices) -> Tensor:
        inputs, targets, *rest = (each.to(how.world.device) for each in blocks.gather(chosen))
        return loss.sums(model.token_losses(inputs, targets, *rest), targets)

    model.eval()
    with how.computing():
        # Every rank makes as many passes, the last perhaps with nothing to do.
        starts = range(0, -(-num_blocks // parts), size)
        for done, start in enumerate(starts, 1):
            chosen = mine[start : start + size]
            if len(chosen):
                total += sums(chosen)
            elif how.computes_together:
                sums(np.zeros(1, dtype=np.int64))
            stopped = how.should_stop(done, len(starts))
            if stopped:
                break
    model.train()
    if stopped:
        return None
    how.sum(total)
    tokens = num_blocks * blocks.sequence_length
    return loss.metrics(total, step=how.step, samples=num_blocks, tokens=tokens)


def compute_batches(
    model: CausalLM,
    batches: Sequence[Indices],
    how: EvalPass,
    compute: Callable[[Indices], Tensor],
    keep: Callable[[int, Tensor], None],
) -> bool:
    """Compute this rank's share of the batches, and keep each result under its batch's number.

    The batches do not depend on the number of ranks, so neither does a result. Returns False when
    a rank was asked to stop.
    """
    index, parts = how.part()
    passes = -(-len(batches) // parts)
    stopped = False
    model.eval()
    with how.computing():
        for done in range(passes):
            mine = done * parts + index
            # Every rank makes as many passes, the last perhaps with nothing to do.
            if mine < len(batches):
                keep(mine, compute(batches[mine]))
            elif how.computes_together:
                compute(batches[0])
            stopped = how.should_stop(done + 1, passes)
            if stopped:
                break
    model.train()
    return not stopped
