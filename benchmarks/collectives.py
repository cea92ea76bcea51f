"""The collectives of `strategy = "shard"` beside gloo's own, between ranks of one machine.

    python -m benchmarks.collectives
    python -m benchmarks.collectives --ranks 4 --megabytes 8

Each rank gives `--megabytes` of fp32. `gather` and `reduce-scatter` are this project's; those of
gloo are `all_gather_single` and, as its reduce-scatter is a whole all-reduce of which all but a
part is dropped, `all_reduce`. They run in turn, `--rounds` times; a time is the median. What a rank
sends is counted as the algorithm has it. A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.tables import Table

_AS_RANK = "--as-rank"
_FOUND = "found.json"
_TIMEOUT_S = 60


def main(argv: Sequence[str]) -> int:
    """Start the ranks, wait for them and print; or be one of them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="COUNT")
    parser.add_argument("--megabytes", type=int, default=20, metavar="MB")
    parser.add_argument("--rounds", type=int, default=20, metavar="COUNT")
    parser.add_argument(_AS_RANK, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.ranks < 2 or arguments.megabytes < 1 or arguments.rounds < 1:
        parser.error("--ranks: at least 2; --megabytes and --rounds: at least 1")
    if arguments.as_rank is not None:
        return _measure(arguments)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.collectives", *argv, "--folder", folder]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([*command, _AS_RANK, str(rank)], env=env)
            for rank in range(arguments.ranks)
        ]
        if any([rank.wait() for rank in ranks]):
            return 1
        found = json.loads((Path(folder) / _FOUND).read_text(encoding="utf-8"))
    table = Table("median ms", "sent MB", "GB/s", labels=found)
    for name, row in found.items():
        rate = row["sent_bytes"] / row["median_s"] / 1e9
        table.row(
            name, f"{row['median_s'] * 1e3:.1f}", f"{row['sent_bytes'] / 1e6:.0f}", f"{rate:.2f}"
        )
    keys = ("ranks", "megabytes", "rounds")
    settings = {key: getattr(arguments, key) for key in keys}
    print(
        json.dumps(
            {
                "benchmark": "collectives",
                **settings,
                "machine": describe_machine(),
                "collectives": found,
            }
        )
    )
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    """Be one of the ranks; the first one writes the medians."""
    import torch
    import torch.distributed as dist

    from payload.train.strategies.shard_comms import SumOfParts, Waiting, gather

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.folder}/meeting",
        rank=arguments.as_rank,
        world_size=arguments.ranks,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    ranks, size = arguments.ranks, arguments.megabytes * 1_000_000
    part, whole = torch.ones(size // 4), torch.empty(ranks * (size // 4))
    gradients, summed = torch.ones(ranks * (size // 4)), torch.empty(size // 4)
    reduce_scatter, group = SumOfParts(Waiting()), dist.group.WORLD
    assert group is not None
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: gather(whole, part),
        "gloo's all-gather": lambda: dist.all_gather_single(whole, part),
        "reduce-scatter": lambda: reduce_scatter(summed, gradients, group, dist.ReduceOp.SUM),
        "gloo's all-reduce": lambda: dist.all_reduce(gradients),
    }
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(arguments.rounds):
        for name, call in calls.items():
            dist.barrier()
            began_s = time.perf_counter()
            call()
            took[name].append(time.perf_counter() - began_s)
        gradients.fill_(1.0)
    if arguments.as_rank == 0:
        sent = {name: (ranks - 1) * size for name in calls}
        sent["gloo's all-reduce"] *= 2
        found = {
            name: {"median_s": statistics.median(times), "sent_bytes": sent[name]}
            for name, times in took.items()
        }
        (arguments.folder / _FOUND).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
