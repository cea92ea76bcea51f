"""named.json: which settings that reach beyond a run a person has named for it on this machine.

A run's other records come back from its nodes and its store. Whoever writes there could name any
data or model of this machine, another store to write to, or sbatch's options, for the next resume
to obey. They could have it wait for weeks, or without the limit of its cost.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from payload.errors import ConfigError
from payload.results import RunPaths, write_whole
from payload.run_config import RunConfig
from payload.run_repair import known_config
from payload.settings import AUTO
from payload.store_address import NONE, is_bucket_address
from payload.untrusted import build, can_see, check_schema, parse_json, read_bytes, shown

SCHEMA_VERSION = 1
MOST_WAIT_S = 3600.0
"""A longer wait is obeyed where a person has named it."""
_WAITS = ("storage.final_wait_s", "limits.hang_timeout_s", "distributed.timeout_s")
_LIMITS = ("limits.max_hours", "limits.max_usd")
_NO_LIMIT = "none"
_PLACES = ("data.dir", "model.init", "storage.results")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """The file's content."""

    settings: Mapping[str, list[str]] = field(default_factory=dict)
    """Values by `section.key`; a folder by its whole path."""
    schema_version: int = SCHEMA_VERSION


def reaching(config: RunConfig) -> dict[str, str]:
    """Return the settings that reach beyond the run's own folder, with their values.

    The limits of time and cost are always among them. Of the others the defaults are left out, and
    waits of up to an hour. So is a model of a hub: it is nothing of this machine.
    """
    found: dict[str, str] = {}
    default = RunConfig()
    if config.data.dir != default.data.dir:
        found["data.dir"] = config.data.dir
    if config.model.init != default.model.init and can_see(Path(config.model.init)):
        found["model.init"] = config.model.init
    if config.storage.results not in (AUTO, NONE):
        found["storage.results"] = config.storage.results
    for each in fields(config.slurm):
        value = getattr(config.slurm, each.name)
        if value != getattr(default.slurm, each.name):
            found[f"slurm.{each.name}"] = str(value)
    found |= {key: str(_value(config, key)) for key in _WAITS if _value(config, key) > MOST_WAIT_S}
    for key in _LIMITS:
        value = _value(config, key)
        found[key] = _NO_LIMIT if value is None else str(value)
    return found


def _value(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def bounded_wait_s(paths: RunPaths, config: RunConfig, key: str) -> float:
    """Return how long a command here waits by the setting `key` of a run, in seconds.

    That is an hour at most where nobody has named a longer time on this machine.
    """
    wait_s, known = float(_value(config, key)), _read(paths)
    if known is None or str(wait_s) in known.settings.get(key, ()):
        return wait_s
    return min(wait_s, MOST_WAIT_S)


def require_named(
    paths: RunPaths, settings: Mapping[str, str], *, named: Collection[str] = ()
) -> None:
    """Refuse what a resumed run's own records alone name.

    `settings` are those that reach beyond it; those in `named` were named by the person who
    resumes. A run that is older than the record is all this machine's own. Raises ConfigError.
    """
    known = _read(paths)
    if known is None:
        return
    unnamed = {
        key: value
        for key, value in settings.items()
        if key not in named and not _is_named(key, value, known.settings.get(key, ()))
    }
    if unnamed:
        words = ", ".join(f"{key} = {shown(value)}" for key, value in unnamed.items())
        raise ConfigError(
            f"run {paths.run_id}: nobody has named {words} for it on this machine. Its settings "
            "may be the word of a node or a store, which moves no files, starts nothing from here "
            f"and raises no limit. If it is right, add {_options(unnamed)}"
        )


def _is_named(key: str, value: str, known: Collection[str]) -> bool:
    """Say whether a person has named this value; of a limit, this or a higher one."""
    if key not in _LIMITS:
        return _whole(key, value) in known
    if not known or _NO_LIMIT in known or value in known:
        return True
    return value != _NO_LIMIT and float(value) <= max(map(float, known))


def note_named(paths: RunPaths, settings: Mapping[str, str]) -> None:
    """Record what a person has named for the run. Raises OSError."""
    before = _read(paths) or _Named()
    merged = {key: set(values) for key, values in before.settings.items()}
    for key, value in settings.items():
        merged.setdefault(key, set()).add(_whole(key, value))
    ordered = {key: sorted(values) for key, values in sorted(merged.items())}
    write_whole(paths.named, json.dumps(asdict(_Named(settings=ordered)), indent=2) + "\n")


def note_brought(paths: RunPaths) -> None:
    """Record the settings of an older version's folder, before it gets those of another place.

    Raises OSError.
    """
    if not paths.named.exists():
        note_named(paths, reaching(known_config(paths)) if paths.config.exists() else {})


def _read(paths: RunPaths) -> _Named | None:
    """Return the record; None where there is none. A damaged one allows nothing."""
    try:
        raw = parse_json(read_bytes(paths.named), where=str(paths.named))
        check_schema(raw, SCHEMA_VERSION, where=str(paths.named))
        return build(_Named, raw, where=str(paths.named))
    except FileNotFoundError:
        return None
    except (OSError, ConfigError):
        return _Named()


def _whole(key: str, value: str) -> str:
    is_place = key in _PLACES and not is_bucket_address(value)
    return str(Path(value).resolve()) if is_place else value


def _options(settings: Mapping[str, str]) -> str:
    """Return the --set of each, as a shell takes it."""
    return " ".join(
        f"--set {shlex.quote(f'{key}={value}')}" if value.isprintable() else f"--set {key}=VALUE"
        for key, value in settings.items()
    )
