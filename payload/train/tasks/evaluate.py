"""Evaluates a validation set. Each rank computes some of the batches; sums are float64."""

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
    """Evaluate only the first samples, up to this number of tokens; None = all."""
    autocast: Callable[[], AbstractContextManager[None]]
    should_stop: Callable[[int, int], bool]
    """Called after every batch with the number of batches done and in total. The result is the same
    on all ranks."""
    without_gradients: Callable[[], AbstractContextManager[object]] = torch.inference_mode
    """The context in which a batch is computed, in addition to `autocast`."""
    computes_together: bool = False
    """True if a rank can compute a batch only while all other ranks compute one.

    A rank without a batch then repeats a batch and drops the result.
    """
    share: tuple[int, int] | None = None
    """(index, count): the samples are divided into `count` parts, and this rank evaluates part
    `index`. None = one part per rank."""
    has_results: bool = True
    """True if this rank's losses count. Of ranks that evaluate the same samples, only one rank's
    losses count."""

    def own_share(self) -> tuple[int, int]:
        """Return (index, count): this rank evaluates part `index` of `count` parts of the
        samples."""
        return (self.world.rank, self.world.world_size) if self.share is None else self.share

    def sum(self, values: Tensor) -> None:
        """Sum the ranks' results in place."""
        if not self.has_results:
            values.zero_()
        self.world.sum(values)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Enter the context in which a batch is computed."""
        with self.without_gradients(), self.autocast():
            yield


def evaluate(
    model: CausalLM, blocks: Blocks, eval_pass: EvalPass, loss: Loss
) -> EvalMetrics | None:
    """Return the metrics over the first `max_tokens` validation tokens, or over all.

    Sums are float64, so the number of ranks does not affect the result. Return None after a request
    to stop.
    """
    size, num_blocks = eval_pass.micro_batch_size, blocks.num_blocks()
    index, parts = eval_pass.own_share()
    if eval_pass.max_tokens is not None:
        num_blocks = min(num_blocks, -(-eval_pass.max_tokens // blocks.sequence_length))
    mine = np.arange(index, num_blocks, parts, dtype=np.int64)
    total = torch.zeros(2, dtype=torch.float64)
    stopped = False

    def sums(chosen: Indices) -> Tensor:
        inputs, targets, *rest = (each.to(eval_pass.world.device) for each in blocks.gather(chosen))
        return loss.sums(model.token_losses(inputs, targets, *rest), targets)

    model.eval()
    with eval_pass.computing():
        # Every rank runs the same number of batches; the last one may be empty.
        starts = range(0, -(-num_blocks // parts), size)
        for done, start in enumerate(starts, 1):
            chosen = mine[start : start + size]
            if len(chosen):
                total += sums(chosen)
            elif eval_pass.computes_together:
                sums(np.zeros(1, dtype=np.int64))
            stopped = eval_pass.should_stop(done, len(starts))
            if stopped:
                break
    model.train()
    if stopped:
        return None
    eval_pass.sum(total)
    tokens = num_blocks * blocks.sequence_length
    return loss.metrics(total, step=eval_pass.step, samples=num_blocks, tokens=tokens)


def compute_batches(
    model: CausalLM,
    batches: Sequence[Indices],
    eval_pass: EvalPass,
    compute: Callable[[Indices], Tensor],
    keep: Callable[[int, Tensor], None],
) -> bool:
    """Compute this rank's share of the batches; pass each result to `keep` with its batch number.

    The batches, and therefore the results, do not depend on the number of ranks. Return False after
    a request to stop.
    """
    index, parts = eval_pass.own_share()
    passes = -(-len(batches) // parts)
    stopped = False
    model.eval()
    with eval_pass.computing():
        for done in range(passes):
            mine = done * parts + index
            # Every rank runs the same number of batches; the last one may be empty.
            if mine < len(batches):
                keep(mine, compute(batches[mine]))
            elif eval_pass.computes_together:
                compute(batches[0])
            stopped = eval_pass.should_stop(done + 1, passes)
            if stopped:
                break
    model.train()
    return not stopped
