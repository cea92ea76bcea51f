"""Creates trackers by name."""

from __future__ import annotations

from importlib import import_module

from payload.config.launch_sections import TRACKERS
from payload.report.trackers.base import Tracker


def make_tracker(name: str) -> Tracker:
    """Return a new tracker from the module with this name."""
    assert name in TRACKERS, "run.toml was checked"
    module = import_module(f"payload.report.trackers.{name}")
    made: Tracker = module.make()
    return made
