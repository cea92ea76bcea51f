"""sent.json: what of this machine a person has let a run's nodes have.

A run's other records come back from its nodes and its store. Who writes there could name any data
or model of this machine in run.toml, for the next resume to send.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from payload.errors import ConfigError
from payload.results import RunPaths, write_whole
from payload.store_address import is_bucket_address
from payload.untrusted import build, check_schema, parse_json, read_bytes, shown

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """The file's content."""

    places: list[str] = field(default_factory=list)
    """Folders by their whole path, and buckets' addresses."""
    schema_version: int = SCHEMA_VERSION


def require_named(
    paths: RunPaths, settings: Mapping[str, str], *, named: Collection[str] = ()
) -> None:
    """Refuse to send what a resumed run's settings alone name.

    `settings` has the place by the setting, `data.dir` or `model.init`; those in `named` were
    named by the person who resumes. Raises ConfigError.
    """
    known = _known(paths)
    for setting, place in settings.items():
        if setting not in named and _whole(place) not in known:
            raise ConfigError(
                f"run {paths.run_id}: nobody has named {setting} = {shown(place)} for it on this "
                "machine. The word of a node or a store sends no files from here. If it is right, "
                f"add --set {setting}={shlex.quote(place) if place.isprintable() else 'PLACE'}"
            )


def note_sent(paths: RunPaths, settings: Mapping[str, str]) -> None:
    """Record that these may go to the run's nodes. Raises OSError."""
    places = sorted({*_known(paths), *map(_whole, settings.values())})
    write_whole(paths.sent, json.dumps(asdict(_Sent(places=places)), indent=2) + "\n")


def _known(paths: RunPaths) -> frozenset[str]:
    try:
        raw = parse_json(read_bytes(paths.sent), where=str(paths.sent))
        check_schema(raw, SCHEMA_VERSION, where=str(paths.sent))
        return frozenset(build(_Sent, raw, where=str(paths.sent)).places)
    except (OSError, ConfigError):
        return frozenset()


def _whole(place: str) -> str:
    return place if is_bucket_address(place) else str(Path(place).resolve())
