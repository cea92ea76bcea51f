"""Seconds of a training step, by kind of operation.

    python -m benchmarks.step_profile --model gpt2 --micro-batch-size 4 --steps 6
    python -m benchmarks.step_profile --model FOLDER --micro-batch-size 4 --steps 6

Times the kernels' library and the matmuls of the layers and the head, in the process that
`benchmarks.step` runs for this project; "other" is the rest of the step. Each time is the median of
all steps but the first. A table goes to stderr; the last line on stdout is one JSON object.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import step_ours
from benchmarks.harness import Benchmark, use_run_allocator
from benchmarks.peers.timed_steps import take_steps
from benchmarks.step_model import model_argument
from payload.kernels import head, linears
from payload.kernels.library import Library

_TIMED: tuple[tuple[object, str, str], ...] = (
    (head, "_logits", "head: logits"),
    (head, "_hidden_gradient", "head: input gradient"),
    (head, "_add_weight_gradient", "head: weight gradient"),
    (head, "_overwrite_logits", "head: weight gradient"),
    (head, "_cross_entropy", "head: loss and its gradient"),
    (linears._Trained, "forward", "layers: forward matmuls"),
    (linears._Trained, "input_gradient", "layers: input gradients"),
    (linears._Trained, "backward", "layers: weight gradients"),
    (linears._Frozen, "forward", "layers: forward matmuls"),
    (linears._Frozen, "input_gradient", "layers: input gradients"),
    (linears._Frozen, "backward", "layers: weight gradients"),
)


class Profile:
    """Seconds of each kind of operation, step by step."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._is_inside = False
        self.steps: list[dict[str, float]] = []
        """Seconds of each kind of work in a step; `step` is the whole step."""

    def timed(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Return `call` with a timer; a timed call inside another one counts for the outer one."""

        def run(*arguments: Any, **options: Any) -> Any:
            if self._is_inside:
                return call(*arguments, **options)
            self._is_inside, began_s = True, time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self._is_inside = False
                # The first argument of the library's own method is the kernel's name.
                name = kind or f"kernel {arguments[1]}"
                self._seconds[name] += time.perf_counter() - began_s

        return run

    def take_steps(
        self, work: dict[str, Any], micro_batch: Callable[[], torch.Tensor], update: Any
    ) -> dict[str, Any]:
        """Take the steps as `benchmarks.step` does, and keep the seconds of each."""
        began_s = 0.0

        def first_call() -> torch.Tensor:
            nonlocal began_s
            began_s = time.perf_counter()
            return micro_batch()

        def last_call() -> None:
            update()
            self.steps.append({**self._seconds, "step": time.perf_counter() - began_s})
            self._seconds.clear()

        return take_steps(work, first_call, last_call)


@contextmanager
def timers() -> Iterator[Profile]:
    """Time the operations within the context."""
    profile, patches = Profile(), []
    for owner, name, kind in (*_TIMED, (Library, "call", "")):
        call = getattr(owner, name)
        patches.append(patch.object(owner, name, profile.timed(call, kind)))
    patches.append(patch.object(step_ours, "take_steps", profile.take_steps))
    for each in patches:
        each.start()
    try:
        yield profile
    finally:
        for each in patches:
            each.stop()


def main(argv: Sequence[str]) -> int:
    """Take the steps and print the table; return the exit status."""
    benchmark = Benchmark("step_profile", __doc__)
    add = benchmark.parser.add_argument
    add("--model", type=model_argument, default="gpt2", metavar="NAME|FOLDER")
    add("--micro-batch-size", type=int, default=4, metavar="SEQUENCES")
    add("--sequence-length", type=int, default=1024, metavar="TOKENS")
    add("--dtype", choices=["bf16", "fp32"], default="bf16")
    add("--steps", type=int, default=6, help="the first warms up")
    arguments = benchmark.parse(argv)
    use_run_allocator()
    options = vars(arguments) | {"accumulation": 1, "adapter": None, "kernels": "auto"}
    work = {key: each for key, each in options.items() if key != "page"}
    with timers() as profile:
        step_ours.main(work)
    steps = profile.steps[1:]
    kinds = {kind for step in steps for kind in step}
    median = {kind: statistics.median(step.get(kind, 0.0) for step in steps) for kind in kinds}
    whole = median.pop("step")
    median["other"] = whole - sum(median.values())
    table = benchmark.table("s", "share", title="kind", labels=median)
    for kind, seconds in sorted(median.items(), key=lambda each: -each[1]):
        table.row(kind, f"{seconds:.3f}", f"{seconds / whole:.0%}")
    table.row("step", f"{whole:.3f}", "100%")
    benchmark.finish(
        {"s": {kind: round(each, 4) for kind, each in median.items()}, "step_s": whole}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
