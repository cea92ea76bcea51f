"""named.json: which settings that reach beyond a run this user has named for it here.

A run's folder and its records may come from anywhere: a node, a store, a project that was cloned.
Whoever wrote them could name any data or model of this machine, another store to write to, or
sbatch's options, for the next resume to obey; or have it wait for weeks, or without the limit of
its cost; or send it to a tracker. The record counts only in the folder that it was made in, with a
proof by this user's key.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from payload.config.run_config import RunConfig
from payload.config.settings import AUTO
from payload.config.store_address import NONE, is_bucket_address
from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.core.printable_text import shown
from payload.core.record_signing_key import PROOF, PROOF_WANTED, is_signed, sign
from payload.core.regular_files import can_see, home_path, read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build, check_schema
from payload.run_record.run_files import RunPaths
from payload.run_record.run_identity import known_identity

SCHEMA_VERSION = 1
MOST_WAIT_S = 3600.0
"""A longer wait is obeyed where a person has named it."""
_WAITS = ("storage.final_wait_s", "limits.hang_timeout_s", "distributed.timeout_s")
_LIMITS = ("limits.max_hours", "limits.max_usd")
_NO_LIMIT = "none"
_PLACES = ("data.dir", "model.init", "storage.results")
SENDING_TRACKERS = ("mlflow", "wandb")
"""Those that a server or a login in the environment may have send a run elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """The file's content."""

    settings: Mapping[str, list[str]] = field(default_factory=dict)
    """Values by `section.key`; a folder by its whole path."""
    proof: str = checked("", pattern=PROOF, wanted=PROOF_WANTED)
    """HMAC-SHA256 of the run's folder, its identity and the settings, in hexadecimal."""
    schema_version: int = SCHEMA_VERSION

    def parts(self, paths: RunPaths, folder: Path) -> tuple[Any, ...]:
        """Return what the proof is of: without `folder`, a copy of the record would count too."""
        return "named", os.path.realpath(folder), known_identity(paths).identity, self.settings


def reaching(
    config: RunConfig, *, reads_init: bool = True, of: Collection[str] | None = None
) -> dict[str, str]:
    """Return the settings that reach beyond the run's own folder, with their values.

    A model of a hub may be one that only this user's cache or token has. A default of `data.dir`
    names a folder like any other. Without `reads_init` nothing is loaded from `model.init`. The
    limits of time and cost are always among them; waits where they are over an hour. `of` are the
    keys that matter, all by default.
    """
    found = {"data.dir": config.data.dir}
    default = RunConfig()
    if reads_init and config.model.init != default.model.init:
        found["model.init"] = config.model.init
    if config.storage.results not in (AUTO, NONE):
        found["storage.results"] = config.storage.results
    if set(SENDING_TRACKERS) & set(config.track.to):
        found["track.to"] = ",".join(config.track.to)
    for each in fields(config.slurm):
        value = getattr(config.slurm, each.name)
        if value != getattr(default.slurm, each.name):
            found[f"slurm.{each.name}"] = str(value)
    found |= {key: str(_value(config, key)) for key in _WAITS if _value(config, key) > MOST_WAIT_S}
    for key in _LIMITS:
        value = _value(config, key)
        found[key] = _NO_LIMIT if value is None else str(value)
    return {key: value for key, value in found.items() if of is None or key in of}


def named_by(overrides: Iterable[str]) -> set[str]:
    """Return the keys of settings that the words of `--set` name."""
    return {each.partition("=")[0].strip() for each in overrides}


def _value(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def bounded_wait_s(paths: RunPaths, config: RunConfig, key: str) -> float:
    """Return how long a command here waits by the setting `key` of a run, in seconds.

    That is an hour at most where nobody has named a longer time on this machine.
    """
    wait_s = float(_value(config, key))
    if str(wait_s) in _read(paths).settings.get(key, ()):
        return wait_s
    return min(wait_s, MOST_WAIT_S)


def is_on_hub(init: str) -> bool:
    """Return True for a `model.init` that names nothing of this machine."""
    return not can_see(home_path(init))


def unnamed(paths: RunPaths, settings: Mapping[str, str]) -> dict[str, str]:
    """Return those of `settings` that this user has not named for the run here."""
    known = _read(paths).settings
    return {
        key: value
        for key, value in settings.items()
        if not _is_named(key, value, known.get(key, ()))
    }


def _is_named(key: str, value: str, known: Collection[str]) -> bool:
    """Return True for a value that this user has named; of a limit, for this or a lower one.

    A limit of a run for which none was ever named here is that of its settings.
    """
    if key not in _LIMITS:
        return _whole(key, value) in known
    if not known or _NO_LIMIT in known or value in known:
        return True
    return value != _NO_LIMIT and float(value) <= max(map(float, known))


def require_named(
    paths: RunPaths, settings: Mapping[str, str], *, named: Collection[str] = ()
) -> None:
    """Refuse what a resumed run's own records alone name.

    `settings` are those that reach beyond it; those in `named` were named by the person who
    resumes. Raises ConfigError.
    """
    loose = {key: value for key, value in unnamed(paths, settings).items() if key not in named}
    if loose:
        words = ", ".join(f"{key} = {shown(value)}" for key, value in loose.items())
        raise ConfigError(
            f"run {paths.run_id}: {words} {'is' if len(loose) == 1 else 'are'} set only in the "
            "run's own files, which others may have written. If it is right, add "
            f"{_options(loose)}"
        )


def note_named(
    paths: RunPaths, settings: Mapping[str, str], *, becomes: Path | None = None
) -> None:
    """Record what this user has named for the run, which has its identity already.

    `becomes` is the run's folder, if that of `paths` gets its name later. Without a key, as in a
    home that nobody may write to, the next resume asks. Raises OSError.
    """
    merged = {key: set(values) for key, values in _read(paths).settings.items()}
    for key, value in settings.items():
        merged.setdefault(key, set()).add(_whole(key, value))
    record = _Named(settings={key: sorted(values) for key, values in sorted(merged.items())})
    record = replace(record, proof=sign(*record.parts(paths, becomes or paths.root)))
    write_whole(paths.named, json.dumps(asdict(record), indent=2) + "\n", is_private=True)


def _read(paths: RunPaths) -> _Named:
    """Return the record; an empty one where there is none that this user has made here."""
    with suppress(OSError, ConfigError):
        raw = parse_json(read_bytes(paths.named), where=str(paths.named))
        check_schema(raw, SCHEMA_VERSION, where=str(paths.named))
        found = build(_Named, raw, where=str(paths.named))
        if is_signed(found.proof, *found.parts(paths, paths.root)):
            return found
    return _Named()


def _whole(key: str, value: str) -> str:
    """Return a setting's value by which it is known: of a place of this machine, the whole path."""
    if key not in _PLACES or is_bucket_address(value):
        return value
    place = home_path(value) if key == "model.init" else Path(value)
    if key == "model.init" and not place.is_absolute() and is_on_hub(value):
        return value
    with suppress(ValueError):  # a path with a NUL names nothing
        return os.path.realpath(place)
    return value


def _options(settings: Mapping[str, str]) -> str:
    """Return the --set of each, as a shell takes it."""
    return " ".join(
        f"--set {shlex.quote(f'{key}={value}')}" if value.isprintable() else f"--set {key}=VALUE"
        for key, value in settings.items()
    )
