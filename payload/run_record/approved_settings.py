"""Records this user's approvals of settings with effects outside the run folder (named.json).

A run folder may come from an untrusted source: a node, a store, a cloned project. The folder's
author could choose data or a model on this machine, a different store, options for sbatch, a wait
of weeks, no cost limit, or a tracker. The next resume would use these settings. The record is valid
only in the folder for which it was written, and only with a proof that was made with this user's
key.
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
"""A wait above this limit needs this user's approval."""
_WAITS = ("storage.final_wait_s", "limits.hang_timeout_s", "distributed.timeout_s")
_LIMITS = ("limits.max_hours", "limits.max_usd")
_NO_LIMIT = "none"
_PLACES = ("data.dir", "model.init", "storage.results")
SENDING_TRACKERS = ("mlflow", "wandb")
"""Trackers that can upload a run, depending on a server or a login in the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """The contents of named.json."""

    settings: Mapping[str, list[str]] = field(default_factory=dict)
    """Approved values by `section.key`; folders are stored as absolute paths."""
    proof: str = checked("", pattern=PROOF, wanted=PROOF_WANTED)
    """HMAC-SHA256 of the run folder, the run identity and the settings, in hexadecimal."""
    schema_version: int = SCHEMA_VERSION

    def parts(self, paths: RunPaths, folder: Path) -> tuple[Any, ...]:
        """Return the signed values; they include `folder`, so a copy of the record is not valid."""
        return "named", os.path.realpath(folder), known_identity(paths).identity, self.settings


def settings_to_approve(
    config: RunConfig, *, reads_init: bool = True, of: Collection[str] | None = None
) -> dict[str, str]:
    """Return the settings that need approval by this user, with their values.

    A hub model needs approval, because this user's cache or token may have access to private
    models. The default of `data.dir` also needs approval. `reads_init=False` leaves out
    `model.init`. The limits of time and cost are always included; waits are included only above one
    hour. If `of` is given, only settings with keys in `of` are returned.
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


def override_keys(overrides: Iterable[str]) -> set[str]:
    """Return the keys of the settings in `overrides`, the values of `--set`."""
    return {each.partition("=")[0].strip() for each in overrides}


def _value(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def bounded_wait_s(paths: RunPaths, config: RunConfig, key: str) -> float:
    """Return the value of a setting for a waiting time, in seconds.

    The value is at most one hour, except for a longer time that this user approved on this machine.
    """
    wait_s = float(_value(config, key))
    if str(wait_s) in _read(paths).settings.get(key, ()):
        return wait_s
    return min(wait_s, MOST_WAIT_S)


def is_on_hub(init: str) -> bool:
    """Return True if `model.init` does not name a path on this machine."""
    return not can_see(home_path(init))


def unapproved_settings(paths: RunPaths, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that this user has not approved for the run on this machine."""
    known = _read(paths).settings
    return {
        key: value
        for key, value in settings.items()
        if not _is_named(key, value, known.get(key, ()))
    }


def _is_named(key: str, value: str, known: Collection[str]) -> bool:
    """Return True if this user approved the value, or, for a limit, an equal or higher value.

    If no limit was ever approved for the run, the limit in the run's settings counts as approved.
    """
    if key not in _LIMITS:
        return _whole(key, value) in known
    if not known or _NO_LIMIT in known or value in known:
        return True
    return value != _NO_LIMIT and float(value) <= max(map(float, known))


def require_approved(
    paths: RunPaths, settings: Mapping[str, str], *, named: Collection[str] = ()
) -> None:
    """Raise ConfigError for settings that come only from the records of the resumed run.

    `settings` are the settings that need approval. `named` are the keys that the user sets in this
    resume.
    """
    missing = {
        key: value
        for key, value in unapproved_settings(paths, settings).items()
        if key not in named
    }
    if missing:
        values = ", ".join(f"{key} = {shown(value)}" for key, value in missing.items())
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"run {paths.run_id}: {values} {verb} set only in the run's own files, which another "
            f"user can edit. To accept them, add {_options(missing)}"
        )


def record_approved(
    paths: RunPaths, settings: Mapping[str, str], *, becomes: Path | None = None
) -> None:
    """Record the settings that this user approved for the run. Raises OSError.

    The run must already have an identity. `becomes` is the final run folder if `paths` will be
    renamed. If no signing key can be created, as in a read-only home, the next resume needs
    approval again.
    """
    merged = {key: set(values) for key, values in _read(paths).settings.items()}
    for key, value in settings.items():
        merged.setdefault(key, set()).add(_whole(key, value))
    record = _Named(settings={key: sorted(values) for key, values in sorted(merged.items())})
    record = replace(record, proof=sign(*record.parts(paths, becomes or paths.root)))
    write_whole(paths.named, json.dumps(asdict(record), indent=2) + "\n", is_private=True)


def _read(paths: RunPaths) -> _Named:
    """Return the record; an empty record if this user did not sign it for this folder."""
    with suppress(OSError, ConfigError):
        raw = parse_json(read_bytes(paths.named), where=str(paths.named))
        check_schema(raw, SCHEMA_VERSION, where=str(paths.named))
        found = build(_Named, raw, where=str(paths.named))
        if is_signed(found.proof, *found.parts(paths, paths.root)):
            return found
    return _Named()


def _whole(key: str, value: str) -> str:
    """Return the value of a setting; a path on this machine becomes absolute."""
    if key not in _PLACES or is_bucket_address(value):
        return value
    place = home_path(value) if key == "model.init" else Path(value)
    if key == "model.init" and not place.is_absolute() and is_on_hub(value):
        return value
    with suppress(ValueError):  # a NUL byte is not valid in a path
        return os.path.realpath(place)
    return value


def _options(settings: Mapping[str, str]) -> str:
    """Return a `--set` option for each setting, quoted for the shell."""
    return " ".join(
        f"--set {shlex.quote(f'{key}={value}')}" if value.isprintable() else f"--set {key}=VALUE"
        for key, value in settings.items()
    )
