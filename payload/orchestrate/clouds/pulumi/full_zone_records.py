"""Records the zones that had no capacity, in .cluster/NAME/zones.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from payload.core.errors import TileforgeError
from payload.core.files import write_whole
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build, check_schema
from payload.stack.google_name_patterns import CLOUD_NAME

_ZONES_VERSION = 1
FULL_HOURS = 6.0
"""Hours for which a zone without capacity is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullZone:
    """A zone that had no capacity."""

    zone: str = checked(pattern=CLOUD_NAME, wanted="a zone")
    time_unix: float
    reason: str

    def describe(self, *, now_unix: float) -> str:
        """Return the zone with the reason and the age of the record in hours."""
        hours = max(0.0, now_unix - self.time_unix) / 3600
        return f"{self.zone} ({self.reason}, {hours:.1f} h ago)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FullZones:
    """The content of .cluster/NAME/zones.json, which later commands read."""

    zones: tuple[FullZone, ...] = ()

    @classmethod
    def load(cls, path: Path, *, now_unix: float) -> FullZones:
        """Return the zones recorded in the last hours; empty if the file is missing or damaged."""
        try:
            raw = parse_json(read_bytes(path), where=str(path))
            check_schema(raw, _ZONES_VERSION, where=str(path))
            known = build(cls, raw, where=str(path))
        except (OSError, TileforgeError):
            return cls()
        oldest = now_unix - FULL_HOURS * 3600
        return cls(zones=tuple(each for each in known.zones if oldest < each.time_unix <= now_unix))

    def without(self, zone: str) -> FullZones:
        """Return the record without `zone`."""
        return FullZones(zones=tuple(each for each in self.zones if each.zone != zone))

    def save(self, path: Path) -> None:
        """Write the record, replacing the file."""
        write_whole(path, json.dumps({"schema_version": _ZONES_VERSION, **asdict(self)}, indent=2))
