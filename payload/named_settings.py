"""named.json: which settings that reach beyond a run a person has named for it on this machine.

A run's other records come back from its nodes and its store. Whoever writes there could name any
data or model of this machine, another store to write to, or sbatch's options, for the next resume
to obey.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from payload.errors import ConfigError
from payload.results import RunPaths, write_whole
from payload.run_config import RunConfig
from payload.run_repair import known_config
from payload.settings import AUTO
from payload.store_address import NONE, is_bucket_address
from payload.untrusted import build, can_see, check_schema, parse_json, read_bytes, shown

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """The file's content."""

    settings: Mapping[str, list[str]] = field(default_factory=dict)
    """Values by `section.key`; a folder by its whole path."""
    schema_version: int = SCHEMA_VERSION


def reaching(config: RunConfig) -> dict[str, str]:
    """Return the settings that reach beyond the run's own folder, with their values.

    Defaults are left out. So is a model of a hub: it is nothing of this machine.
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
    return found


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
        if key not in named and _whole(key, value) not in known.settings.get(key, ())
    }
    if unnamed:
        words = ", ".join(f"{key} = {shown(value)}" for key, value in unnamed.items())
        raise ConfigError(
            f"run {paths.run_id}: nobody has named {words} for it on this machine. Its settings "
            "may be the word of a node or a store, which moves no files and starts nothing from "
            f"here. If it is right, add {_options(unnamed)}"
        )


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
    is_place = not key.startswith("slurm.") and not is_bucket_address(value)
    return str(Path(value).resolve()) if is_place else value


def _options(settings: Mapping[str, str]) -> str:
    """Return the --set of each, as a shell takes it."""
    return " ".join(
        f"--set {shlex.quote(f'{key}={value}')}" if value.isprintable() else f"--set {key}=VALUE"
        for key, value in settings.items()
    )
