"""Which strategy a run trains by."""

from __future__ import annotations

from payload.run_config import DistributedSection
from payload.train.strategies.base import Strategy
from payload.train.strategies.replicate import Replicate
from payload.train.world import World


def choose_strategy(settings: DistributedSection, world: World) -> Strategy:
    """Return the run's strategy on this rank."""
    return Replicate(settings, world)
