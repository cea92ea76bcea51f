"""Opens the data folder of a run as its task."""

from __future__ import annotations

from payload.config.run_config import RunConfig
from payload.train.tasks import chat, classify, preference, text
from payload.train.tasks.base import Task


def open_task(config: RunConfig) -> Task:
    """Return the run's task. Raises DataError, ConfigError for a folder that does not suit it."""
    if config.task.kind == "chat":
        return chat.open_task(config)
    if config.task.kind == "classify":
        return classify.open_task(config)
    if config.task.kind == "preference":
        return preference.open_task(config)
    return text.open_task(config)
