"""CONTRACT: the tasks of data preparation and of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

TaskKind = Literal["text", "chat", "classify", "preference"]
"""The prediction that a model learns. `text`: the next token of plain text. `chat`: the assistant's
tokens of conversations. `classify`: a label for each text. `preference`: which of two answers is
better (DPO)."""
TASK_KINDS: tuple[TaskKind, ...] = get_args(TaskKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """One value of `task.kind` in run.toml."""

    data: TaskKind
    """The task that the data is prepared for, as in `prepare --task`."""
    loss: str
    """Name of the loss: a file of `payload/train/losses`."""
    splits_model: bool = False
    """True if the loss supports tensor and pipeline parallelism."""


TASKS = {
    "text": TrainingTask(data="text", loss="next_token", splits_model=True),
    "chat": TrainingTask(data="chat", loss="next_token", splits_model=True),
    "classify": TrainingTask(data="classify", loss="classification"),
    "preference": TrainingTask(data="preference", loss="preference"),
}


def training_tasks() -> tuple[str, ...]:
    """Return the values of `task.kind`."""
    return tuple(TASKS)
