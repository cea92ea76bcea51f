"""Opens the data folder of a run as its task."""

from __future__ import annotations

from collections.abc import Callable

from payload.config.run_config import RunConfig
from payload.core.tasks import TaskKind
from payload.train.tasks import chat, classify, preference, text
from payload.train.tasks.base import Task


def open_task(config: RunConfig) -> Task:
    """Return the run's task. Raises DataError, and ConfigError for a folder of a different task."""
    openers: dict[TaskKind, Callable[[RunConfig], Task]] = {
        "text": text.open_task,
        "chat": chat.open_task,
        "classify": classify.open_task,
        "preference": preference.open_task,
    }
    return openers[config.task.data()](config)
