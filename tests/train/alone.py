"""Training of a single rank in the test's own process."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from payload.config.run_config import load_run_config
from payload.run_record.run_files import RunPaths
from payload.train import gemm_and_network_benchmark as calibration
from payload.train.ranks.world import World
from payload.train.session import train
from payload.train.start_clock import StartClock
from payload.train.trainer import Outcome

ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="here")


def train_alone(folder: Path, config: Path, *overrides: str, stops: bool = False) -> Outcome:
    """Train a run in `folder`; with `stops`, a stop is requested from the beginning.

    The calibration measures only one product: otherwise it would take most of a short run.
    """
    with patch.object(calibration, "_GEMM_BUDGET_S", 0.0):
        return train(
            load_run_config(config, overrides=["schedule.warmup_steps=0", *overrides]),
            paths=RunPaths(folder),
            world=ALONE,
            stop_requested=lambda: stops,
            clock=StartClock(),
        )
