"""A launcher that starts the ranks of one machine itself: the minimum for a new launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from payload.launch.launcher import Job, Launcher
from payload.machines.rank_variables import TORCH


class Toy(Launcher):
    """This file, started as a program with the number of ranks and each rank's words."""

    variables = TORCH
    spans_nodes = False

    def argv(self, job: Job) -> tuple[str, ...]:
        """Return this module's command line."""
        return (
            job.executable,
            "-m",
            type(self).__module__,
            str(job.world_size),
            *job.rank_arguments,
        )


LAUNCHER = Toy()


def main(arguments: Sequence[str]) -> int:
    """Start every rank, wait for all, and return the worst status."""
    world_size, *words = arguments
    ranks = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, TORCH.rank: str(rank), TORCH.world_size: world_size},
        )
        for rank in range(int(world_size))
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
