"""The order of a stage's forward and backward passes in a step.

torch.distributed.pipelining is not used. Its schedules cut one batch into equal pieces, which
excludes micro-batches of different lengths (conversations), packed documents, weighted losses,
dropout seeds per micro-batch and evaluation. Its stages also exchange shapes by pickle, which runs
code that another rank sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from torch import Tensor

from payload.train.models.stage import Stage

PipelineSchedule = Literal["1f1b", "gpipe"]
Pass = tuple[Literal["forward", "backward"], int]


def schedule_order(
    schedule: PipelineSchedule, *, stage: int, stages: int, passes: int
) -> Iterator[Pass]:
    """Yield one stage's forward and backward passes in order.

    GPipe runs all forward passes first. 1F1B (https://arxiv.org/abs/2006.09503) begins each
    backward pass as early as possible: a stage that is followed by n stages keeps the activations
    of at most n + 1 micro-batches.
    """
    ahead = passes if schedule == "gpipe" else min(passes, stages - stage)
    for number in range(ahead):
        yield "forward", number
    for number in range(passes):
        yield "backward", number
        if ahead + number < passes:
            yield "forward", ahead + number


def run_schedule(
    stage: Stage,
    passes: Iterator[Pass],
    *,
    forward: Callable[[int], Tensor],
    backward: Callable[[Tensor, Tensor | None], None],
) -> None:
    """Run a step's forward and backward passes on this stage.

    `forward` receives the index of a micro-batch and returns the stage's output; on the last stage,
    the output is the loss. `backward` receives the output. On all stages before the last, it also
    receives the output's gradient. Gradients are accumulated in the order of the backward passes.
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
