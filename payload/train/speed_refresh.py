"""Updates the stored speed of this machine, which `plan` reads, with a run's calibration."""

from __future__ import annotations

import os
import time

import torch

from payload.machines.core_use import MOST_OTHERS
from payload.machines.speed_cache import refresh_speed
from payload.train.gemm_and_network_benchmark import Calibration
from payload.train.ranks.world import World


def refresh_known_speed(calibration: Calibration, world: World, *, others_share: float) -> None:
    """Update the peak in the run's dtype, if this machine was measured before.

    `others_share` is the share of this rank's cores that other programs used during calibration. If
    the share is large, the speed is not updated. All ranks call this function.
    """
    if world.nodes() > 1 or not world.is_cpu:
        return
    cores = sum(world.gather(torch.get_num_threads(), int))
    if world.is_main and others_share <= MOST_OTHERS:
        refresh_speed(
            os.environ,
            cores=cores,
            dtype=calibration.dtype,
            flops_per_s=calibration.peak_flops_per_s,
            now_unix=time.time(),
        )
