"""The available optimizers: every file of this package except `base` and `registry`."""

from __future__ import annotations

import importlib

from payload import optimizers
from payload.core.errors import ConfigError
from payload.core.package_members import member_names
from payload.optimizers.base import Optimizer

DEFAULT = "adamw"

_NOT_OPTIMIZERS = ("base", "registry")


def names() -> list[str]:
    """Return every optimizer's name, in alphabetical order."""
    return member_names(optimizers, besides=_NOT_OPTIMIZERS)


def find(name: str) -> Optimizer:
    """Return the optimizer `name`.

    For an unknown name, raises ConfigError with the available names.
    """
    known = names()
    if name not in known:
        raise ConfigError(f"optimizer.name = {name!r}: choose one of {', '.join(known)}.")
    module = importlib.import_module(f"{optimizers.__name__}.{name}")
    optimizer: Optimizer = module.OPTIMIZER
    return optimizer


def default_state_bytes() -> int:
    """Return the bytes of state per trained weight of the default optimizer."""
    return find(DEFAULT).state_bytes
