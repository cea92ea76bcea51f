"""The registry of launchers: one for each file of this package that defines `LAUNCHER`."""

from __future__ import annotations

import importlib

from payload.core.errors import ConfigError
from payload.core.package_members import member_names
from payload.launch import launchers
from payload.launch.launcher import Launcher

AUTO = "auto"

_NOT_LAUNCHERS = ("registry",)


def names() -> list[str]:
    """Return every launcher's name, in alphabetical order."""
    return member_names(launchers, besides=_NOT_LAUNCHERS)


def find(name: str) -> Launcher:
    """Return the launcher with this name. Raises ConfigError, which lists the known names."""
    known = names()
    if name not in known:
        raise ConfigError(
            f"launch.launcher = {name!r}: unknown launcher. Use one of {', '.join([AUTO, *known])}."
        )
    module = importlib.import_module(f"{launchers.__name__}.{name}")
    launcher: Launcher = module.LAUNCHER
    return launcher


def candidates(setting: str) -> list[Launcher]:
    """Return the launchers that `launch.launcher` allows, the preferred one first."""
    if setting != AUTO:
        return [find(setting)]
    known = [find(name) for name in names()]
    ranked = [(each.preference, each) for each in known if each.preference is not None]
    return [launcher for _, launcher in sorted(ranked, key=lambda pair: pair[0])]
