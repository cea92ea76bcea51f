"""Finds the last measured training speed on the same machine type, in local run folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from payload.core.errors import ConfigError
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import RUN_ID
from payload.core.validation.records import build

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Training speed of a finished run."""

    run_id: str
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """The fields of summary.json from which the speed is read."""

    status: str
    tokens_per_s: float = checked(low=1e-9, high=1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    machine_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inventory:
    """The fields of inventory.json that identify the machines."""

    nodes: tuple[_Node, ...]


def last_measured_speed(runs: Path, *, machine_type: str, node_count: int) -> Speed | None:
    """Return the speed of the newest finished run on the same machines and node count, or None.

    The newest run is the run with the most recently modified summary.json. Damaged runs are
    ignored.
    """
    found = []
    for path in runs.glob("*/summary.json"):
        name = path.parent.name
        if path.parent.is_symlink() or not RUN_ID.fullmatch(name):
            continue
        summary = _read(_Summary, path)
        inventory = _read(_Inventory, path.with_name("inventory.json"))
        if summary is None or inventory is None or summary.status != "finished":
            continue
        if [node.machine_type for node in inventory.nodes] == [machine_type] * node_count:
            speed = Speed(run_id=name, tokens_per_s=summary.tokens_per_s)
            found.append((path.stat().st_mtime, speed))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _read(cls: type[_T], path: Path) -> _T | None:
    where = str(path)
    try:
        return build(cls, parse_json(read_bytes(path), where=where), where=where)
    except (OSError, ConfigError):
        return None
