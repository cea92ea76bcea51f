"""Parses Google's messages about zones without capacity. All functions are pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from payload.core.errors import CapacityError, ConfigError, TileforgeError
from payload.core.one_line import joined_lines
from payload.core.suggested_commands import command

_ZONE = r"[a-z]+(?:-[a-z]+)+\d+-[a-z]"
_NO_CAPACITY = re.compile(
    r"(ZONE|REGION)_RESOURCE_POOL_EXHAUSTED|does not have enough resources available|STOCKOUT"
    r"|insufficientCapacity|VM instance[^.]* is currently unavailable in the|zonesAvailable"
)
_FULL_ZONES = (
    rf"zones/({_ZONE})'? does not have enough resources",
    rf"currently unavailable in the ({_ZONE}) zone",
    rf"not supported in the ({_ZONE}) zone",
    rf"""["']?\bzone["']?\s*[:=]>?\s*["']?({_ZONE})\b""",
)
_FREE_ZONES = (
    rf"[Cc]onsider trying your request in the ((?:{_ZONE}(?:, )?)+) zone\(s\)",
    rf"""zonesAvailable["']?\s*[:=]>?\s*["']?((?:{_ZONE},? ?)+)""",
)
_MACHINE = re.compile(r"\bAn? ([a-z0-9]+-[a-z0-9-]+) VM instance")
_NOT_OFFERED = re.compile(
    r"Machine type with name '(?P<name>[a-z0-9-]{1,63})' does not exist in zone "
    rf"'(?P<zone>{_ZONE})'"
    rf"|zones/(?P<in>{_ZONE})/(?:machineTypes|diskTypes)/(?P<type>[a-z0-9-]{{1,63}})' was not found"
)
_PREEMPTED = re.compile(r"failed to start due to preemption|\bPREEMPTED\b")

Reason = Literal["full", "not offered", "preempted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StockOut:
    """Zones without capacity for the cluster, parsed from Google's message."""

    machine_type: str | None
    full: Sequence[str]
    """Zones without capacity, in the order in which Pulumi's output names them."""
    free: Sequence[str]
    """Zones that Google's message suggests."""
    reason: Reason = "full"

    @property
    def shown_reason(self) -> str:
        """Return the reason for skipping the zone, for the list of skipped zones."""
        if self.reason == "preempted":
            return "preempted spot machines"
        state = "free" if self.reason == "full" else "offered"
        return f"no {self.machine_type or 'machine of this type'} {state}"

    def error(self, what: str) -> TileforgeError:
        """Return the error to raise for the failed operation `what`."""
        kind = ConfigError if self.reason == "not offered" else CapacityError
        return kind(f"{what}: {self.describe()}")

    def describe(self) -> str:
        """Return the cause and the next command."""
        machine = self.machine_type or "machine of this type"
        build = command("orchestrate", "up")
        tried = ", ".join(self.full) or "the current zone"
        if self.reason == "not offered":
            return (
                f"{machine} is not offered in {tried}. Try the next zone of the config: {build} "
                f"--next-zone; or check every zone: {command('orchestrate', 'doctor')}"
            )
        if self.reason == "preempted":
            return (
                f"a spot machine was preempted during its creation, in {tried}. Try the next zone "
                f"of the config: {build} --next-zone; or try again later"
            )
        if self.free:
            zone = self.free[0]
            return (
                f"no {machine} is free in {tried}. Google Cloud suggests {', '.join(self.free)}: "
                f"pulumi config set --path 'zones[0]' {zone} && {build}"
            )
        return (
            f"no {machine} is free in {tried}, and Google Cloud suggests no other zone. Try the "
            f"next zone of the config: {build} --next-zone; or try again later, or choose another "
            "machineType"
        )


def find_stock_out(output: str) -> StockOut | None:
    """Return the stock-out that Pulumi's output reports, or None."""
    flat = joined_lines(output, longest=None)
    missing = _NOT_OFFERED.search(flat)
    if missing is not None:
        name, zone = missing["name"] or missing["type"], missing["zone"] or missing["in"]
        return StockOut(machine_type=name, full=[zone], free=[], reason="not offered")
    if _PREEMPTED.search(flat):
        return StockOut(machine_type=None, full=[], free=[], reason="preempted")
    if not _NO_CAPACITY.search(flat):
        return None
    machine = _MACHINE.search(flat)
    free = [zone for each in _found(_FREE_ZONES, flat) for zone in re.findall(_ZONE, each)]
    full = _once(_found(_FULL_ZONES, flat))
    return StockOut(
        machine_type=machine.group(1) if machine else None,
        full=full,
        free=[zone for zone in _once(free) if zone not in full],
    )


def _found(patterns: Sequence[str], text: str) -> list[str]:
    hits = [(m.start(), m.group(1)) for each in patterns for m in re.finditer(each, text)]
    return [name for _, name in sorted(hits)]


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
