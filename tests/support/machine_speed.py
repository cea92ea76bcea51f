"""A measured speed of this machine, for the cache that `plan` reads."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from payload.machines.speed_cache import MachineSpeed, SpeedKey, speed_folder, write_speed
from payload.machines.speed_process import SOURCE

SPEED_KEY = SpeedKey(
    cpu="Some CPU", flags=("avx2", "avx512f"), cores=2, torch="2.13.0", masks=(("A", "b"),)
)


def make_speed(key: SpeedKey = SPEED_KEY, **changes: Any) -> MachineSpeed:
    """Return a measurement for the key: 1 TFLOP/s in bf16, on an idle machine in 2001."""
    values = {
        **{"key_sha256": key.sha256(), "cpu": key.cpu, "cores": key.cores},
        **{"bf16_flops_per_s": 1e12, "fp32_flops_per_s": 4e11, "update_core_s": 2e-9},
        **{"layers": ()},
        **{"others_share": 0.0, "measured_unix": 1e9},
    }
    return MachineSpeed(**{**values, **changes})


def use_table_of_speeds() -> None:
    """Plan with the table of typical speeds: a measurement would depend on the tests beside it."""
    os.environ[SOURCE] = "table"


def plant_speed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[Path, SpeedKey]:
    """Make `folder` the user's cache, with a measurement of this machine.

    Return the folder of the measurements, and this machine's key.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.delenv(SOURCE, raising=False)
    key = SpeedKey.of_this_machine(os.environ)
    assert key is not None
    speeds = speed_folder(os.environ)
    write_speed(speeds, key, make_speed(key, **{"measured_unix": time.time(), **changes}))
    return speeds, key
