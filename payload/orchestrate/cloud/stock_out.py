"""What Google says about machines that it does not have: in which zones, and where some are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from payload.hints import command

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StockOut:
    """What the cloud said about machines that it has not."""

    machine_type: str | None
    full: Sequence[str]
    """Zones without one, in the order of the output."""
    free: Sequence[str]
    """Zones that the error says have some."""

    def describe(self) -> str:
        """What happened and the next command."""
        machine = self.machine_type or "such machine"
        build = command("orchestrate", "up")
        tried = ", ".join(self.full) or "the zone that was tried"
        if self.free:
            zone = self.free[0]
            return (
                f"no {machine} is free in {tried}. Google Cloud says that {', '.join(self.free)} "
                f"has: pulumi config set --path 'zones[0]' {zone} && {build}"
            )
        return (
            f"no {machine} is free in {tried}, and Google Cloud names no zone that has one. Try "
            f"the next zone of the config: {build} --next-zone; or later, or another machineType"
        )


def find_stock_out(output: str) -> StockOut | None:
    """The stock-out that Pulumi's output tells of, or None."""
    flat = " ".join(output.split())
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
