"""Find the plug-ins of a package: each of its files defines one object."""

from __future__ import annotations

import pkgutil
from collections.abc import Collection
from types import ModuleType


def member_names(package: ModuleType, *, besides: Collection[str]) -> list[str]:
    """Return the names of a package's files in alphabetical order, without the names in
    `besides`."""
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in found if name not in besides)


def file_name(member: object) -> str:
    """Return the name of the file that defines the class of `member`, without its suffix."""
    return type(member).__module__.rpartition(".")[2]
