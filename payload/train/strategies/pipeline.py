"""The order of a stage's passes in a step.

Not torch.distributed.pipelining: its schedules cut one batch into equal pieces, so that passes of
other lengths (conversations), packed documents, a loss with weights, dropout seeds by pass and
evaluation do not fit; and its stages exchange shapes by pickle, which runs what another rank sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from torch import Tensor

from payload.train.models.stage import Stage

PipelineSchedule = Literal["1f1b", "gpipe"]
Pass = tuple[Literal["forward", "backward"], int]


def order(schedule: PipelineSchedule, *, stage: int, stages: int, passes: int) -> Iterator[Pass]:
    """Yield the forward and backward passes of one stage, in the order in which it makes them.

    GPipe makes all forward passes first. 1F1B (https://arxiv.org/abs/2006.09503) begins a backward
    pass as soon as it can: a stage keeps the activations of so many passes as stages follow it, and
    its own, at most.
    """
    ahead = passes if schedule == "gpipe" else min(passes, stages - stage)
    for number in range(ahead):
        yield "forward", number
    for number in range(passes):
        yield "backward", number
        if ahead + number < passes:
            yield "forward", ahead + number


def run_passes(
    stage: Stage,
    passes: Iterator[Pass],
    *,
    forward: Callable[[int], Tensor],
    backward: Callable[[Tensor, Tensor | None], None],
) -> None:
    """Make a step's passes on this stage.

    `forward` makes the pass of that number and returns the stage's result, which is the loss on the
    last one; `backward` gets it again, with its gradient unless it is the loss. Gradients are added
    up in the order of the passes.
    """
    results: deque[Tensor] = deque()
    for kind, number in passes:
        if kind == "forward":
            results.append(forward(number))
            if not stage.is_last():
                stage.send(results[-1])
            continue
        result = results.popleft()
        if stage.is_last():
            backward(result, None)
        else:
            backward(result, stage.receive_back(result).to(result.dtype))
        if not stage.is_first():
            stage.send_back()
    stage.finish()
