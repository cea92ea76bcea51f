"""Selects a run's strategy."""

from __future__ import annotations

from payload.config.launch_sections import DistributedSection
from payload.train.ranks.world import World
from payload.train.strategies.base import Strategy
from payload.train.strategies.replicate import Replicate


def choose_strategy(settings: DistributedSection, world: World) -> Strategy:
    """Return the run's strategy on this rank."""
    if world.world_size > 1 and settings.splits_model():
        from payload.train.strategies.model_parallel import ModelParallel

        return ModelParallel(settings, world)
    if settings.strategy == "replicate" or world.world_size == 1:
        return Replicate(settings, world)
    if settings.strategy == "zero3":
        from payload.train.strategies.zero3 import Zero3

        return Zero3(settings, world)
    # Imported here: FSDP2 takes a second to import.
    from payload.train.strategies.shard import Shard

    return Shard(settings, world)
