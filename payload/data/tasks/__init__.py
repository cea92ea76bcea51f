"""Tasks for which data is prepared. Each has a module with a class of the type `base.Task`."""

from __future__ import annotations

from payload.core.tasks import TASK_KINDS, TaskKind
from payload.data.tasks.base import Task


def task_of(kind: TaskKind) -> Task:
    """Return the task of this kind."""
    if kind == "chat":
        from payload.data.tasks.chat import ChatTask

        return ChatTask()
    if kind == "classify":
        from payload.data.tasks.classify import ClassifyTask

        return ClassifyTask()
    if kind == "preference":
        from payload.data.tasks.preference import PreferenceTask

        return PreferenceTask()
    from payload.data.tasks.text import TextTask

    return TextTask()


def all_tasks() -> tuple[Task, ...]:
    """Return every task."""
    return tuple(map(task_of, TASK_KINDS))
