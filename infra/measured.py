"""The last measured speed on machines like the ones asked for, from the run folders here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a finished run trained."""

    run_id: str
    tokens_per_s: float


def last_measured_speed(runs: Path, *, machine_type: str, node_count: int) -> Speed | None:
    """Of the newest finished run under `runs` on as many nodes, all of this machine type.

    Newest is the latest written summary.json. A damaged or foreign run counts as none.
    """
    found = [
        (summary.stat().st_mtime, speed)
        for summary in runs.glob("*/summary.json")
        if not summary.parent.is_symlink()
        and (speed := _speed(summary, machine_type=machine_type, node_count=node_count))
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _speed(summary: Path, *, machine_type: str, node_count: int) -> Speed | None:
    result, inventory = _read(summary), _read(summary.with_name("inventory.json"))
    nodes, speed = inventory.get("nodes"), result.get("tokens_per_s")
    if not isinstance(nodes, list) or len(nodes) != node_count:
        return None
    if any(
        not isinstance(node, dict) or node.get("machine_type") != machine_type for node in nodes
    ):
        return None
    finished = result.get("status") == "finished"
    if not finished or not isinstance(speed, (int, float)) or isinstance(speed, bool) or speed <= 0:
        return None
    return Speed(run_id=summary.parent.name, tokens_per_s=float(speed))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
