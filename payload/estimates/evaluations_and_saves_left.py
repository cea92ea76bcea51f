"""Counts the evaluations and checkpoints that are due in the rest of a run."""

from __future__ import annotations

from payload.config.training_sections import TrainSection


def evaluations_left(train: TrainSection, step: int) -> int:
    """Return the number of evaluations after `step`."""
    return _due_between(train.eval_every, step, train.steps - 1) + (step < train.steps)


def saves_left(train: TrainSection, step: int) -> int:
    """Return the number of checkpoints after `step`."""
    return _due_between(train.checkpoint_every, step, train.steps - 1) + (step < train.steps)


def _due_between(every: int, after: int, last: int) -> int:
    return max(0, last // every - after // every) if every else 0
