"""One rank of an exchange in `benchmarks.scaling`: all-reduces of a step's gradient buckets.

Rank 0 prints one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from payload.config.launch_sections import DistributedSection
from payload.train.ranks.world import World

_SMALL_ELEMENTS = 1024
_SMALL_ROUNDS = 50


def main(request: dict[str, Any]) -> None:
    """Join the group, exchange, and print the times."""
    world = World.from_env(os.environ)
    world.join(DistributedSection(timeout_s=300.0))
    gradients = [torch.ones(numbers) for numbers in request["numbers"]]
    sent = [each.to(torch.bfloat16) for each in gradients] if request["dtype"] == "bf16" else None

    def reduce_all_buckets() -> None:
        pending = [dist.all_reduce(each, async_op=True) for each in sent or gradients]
        for work in pending:
            assert work is not None
            work.wait()

    def reduce_small() -> None:
        for _ in range(_SMALL_ROUNDS):
            dist.all_reduce(small)

    def convert() -> None:
        for each in gradients:
            each.copy_(each.to(torch.bfloat16))

    small = torch.ones(_SMALL_ELEMENTS)
    took = [_timed(world, reduce_all_buckets) for _ in range(request["rounds"])]
    small_took = [_timed(world, reduce_small) for _ in range(3)]
    converted = [_timed(world, convert) for _ in range(3)]
    if world.is_main:
        report = {
            "took_s": [round(wall_s, 5) for wall_s, _ in took],
            "cpu_s": [round(cpu_s, 5) for _, cpu_s in took],
            "small_s": statistics.median(wall_s for wall_s, _ in small_took) / _SMALL_ROUNDS,
            "convert_s": statistics.median(cpu_s for _, cpu_s in converted),
        }
        print(json.dumps(report), flush=True)
    world.barrier()
    world.leave()


def _timed(world: World, call: Callable[[], None]) -> tuple[float, float]:
    """Return the wall time and the CPU time of a call, in seconds."""
    world.barrier()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - started_s, time.process_time() - started_cpu_s


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
