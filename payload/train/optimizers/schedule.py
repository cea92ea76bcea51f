"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from payload.config.run_config import RunConfig


def lr_at(step: int, config: RunConfig) -> float:
    """Return the learning rate of update number `step`, counted from 0.

    The warm-up is linear, and its first learning rate is above zero. After the warm-up, `cosine`
    falls to min_lr at decay_steps, and `constant` stays at lr. `wsd` stays at lr, then falls
    linearly to min_lr over the last decay_steps.
    """
    optimizer, schedule = config.optimizer, config.schedule
    if step < schedule.warmup_steps:
        return optimizer.lr * (step + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant":
        return optimizer.lr
    span = optimizer.lr - optimizer.min_lr
    if schedule.kind == "wsd":
        left = (config.train.steps - step) / config.decay_steps()
        return optimizer.min_lr + span * min(1.0, max(0.0, left))
    length = config.decay_steps() - schedule.warmup_steps
    done = min(1.0, (step - schedule.warmup_steps) / length)
    return optimizer.min_lr + span * 0.5 * (1.0 + math.cos(math.pi * done))
