"""The timed loop of every contender of `benchmarks.step`.

It needs only torch, so that it also runs in a peer's own environment.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def take_steps(
    work: Mapping[str, Any], micro_batch: Callable[[], torch.Tensor], update: Callable[[], None]
) -> dict[str, Any]:
    """Take the steps and return their times, the last loss and the peak memory.

    `micro_batch` makes a forward and a backward pass and returns the loss of one micro-batch.
    `update` clips the gradients and updates the weights.
    """
    step_s, cpu_s, loss = [], [], torch.zeros(())
    for _ in range(work["steps"]):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(work["accumulation"]):
            loss = micro_batch()
        update()
        step_s.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - began_cpu_s)
    return {
        "step_s": step_s,
        "cpu_s": cpu_s,
        "last_loss": loss.item(),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def peak_rss_bytes() -> int:
    """Return the high-water mark of this process's resident set."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def random_batch(work: Mapping[str, Any], vocab_size: int) -> torch.Tensor:
    """Return random tokens, (micro-batch size, sequence length + 1)."""
    return torch.randint(vocab_size, (work["micro_batch_size"], work["sequence_length"] + 1))


def precision(work: Mapping[str, Any]) -> AbstractContextManager[object]:
    """Return the context of a forward pass: autocast to bf16, or nothing in fp32."""
    is_bf16 = work["dtype"] == "bf16"
    return torch.autocast("cpu", dtype=torch.bfloat16) if is_bf16 else nullcontext()
