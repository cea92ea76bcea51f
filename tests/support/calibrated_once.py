"""Measures the machine once for all runs of a process.

The measurement is half of the time of a short run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from payload.train import session
from payload.train.calibration import Calibration, calibrate
from payload.train.strategies.shard_times import Sharded
from payload.train.world import World
from payload.training_sections import DtypeChoice

_found: dict[tuple[object, ...], Calibration] = {}


@contextlib.contextmanager
def calibrated_once() -> Iterator[None]:
    """Let a run use the measurement of an earlier one on as many ranks.

    A test's own replacement of `calibrate` stays.
    """
    if vars(session)["calibrate"] is not calibrate:
        yield
        return
    with mock.patch.object(session, "calibrate", _calibrate):
        yield


def _calibrate(
    world: World, choice: DtypeChoice, *, quantizes: bool = False, sharded: Sharded | None = None
) -> Calibration:
    key = (world.world_size, choice, quantizes, sharded and sharded.by_gloo)
    if key not in _found:
        _found[key] = calibrate(world, choice, quantizes=quantizes, sharded=sharded)
    return _found[key]
