"""Opens the data folder of a run as its task."""

from __future__ import annotations

from payload.config.run_config import RunConfig
from payload.train.tasks import chat, classify, preference, text
from payload.train.tasks.base import Task


def open_task(config: RunConfig) -> Task:
    """Return the run's task. Raises DataError, ConfigError for a folder that does not suit it."""
    modules = {"text": text, "chat": chat, "classify": classify, "preference": preference}
    return modules[config.task.data()].open_task(config)
