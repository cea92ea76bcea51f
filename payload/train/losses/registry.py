"""The available losses: every file of this package except `base` and `registry`."""

from __future__ import annotations

import importlib

from payload.config.training_sections import TaskSection
from payload.core.errors import ConfigError
from payload.core.package_members import member_names
from payload.core.tasks import TASKS
from payload.formats.data_folder import DataMeta
from payload.train import losses
from payload.train.losses.base import Loss

_NOT_LOSSES = ("base", "registry")


def names() -> list[str]:
    """Return every loss's name, in alphabetical order."""
    return member_names(losses, besides=_NOT_LOSSES)


def loss_of(task: TaskSection, meta: DataMeta) -> Loss:
    """Return the loss of a run's task. Raises ConfigError with the known losses."""
    name, known = TASKS[task.kind].loss, names()
    if name not in known:
        raise ConfigError(
            f"task.kind = {task.kind!r}: its loss {name!r} does not exist. Use one of "
            f"{', '.join(known)}."
        )
    module = importlib.import_module(f"{losses.__name__}.{name}")
    loss: type[Loss] = module.LOSS
    return loss.of(task, meta)
