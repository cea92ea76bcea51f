"""How large and how dear a stack is, from its resources alone. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infra.security_checks import Resource
from payload.pricing.cloud_prices import disk_price, machine_price


def number_of_nodes(resources: Sequence[Resource]) -> int:
    """How many machines there are."""
    return len(_instances(resources))


def too_dear(resources: Sequence[Resource], *, most_usd: float) -> Iterator[str]:
    """Why the machines with their disks may cost more than `most_usd` dollars an hour."""
    prices = {str(found["name"]): _price(found) for found in _instances(resources)}
    unknown = sorted(name for name, price in prices.items() if price is None)
    if unknown:
        yield f"no price is known of {', '.join(unknown)}, so ${most_usd:g} an hour cannot be kept"
    total = sum(price or 0.0 for price in prices.values())
    if total > most_usd:
        yield f"machines and disks cost ${total:.2f} an hour, and at most ${most_usd:g} are allowed"


def _instances(resources: Sequence[Resource]) -> list[Resource]:
    return [found for found in resources if str(found["type"]).endswith(":Instance")]


def _price(instance: Resource) -> float | None:
    inputs = instance["inputs"]
    region = str(inputs.get("zone", "")).rpartition("-")[0]
    spot = (inputs.get("scheduling") or {}).get("provisioningModel") == "SPOT"
    disk = (inputs.get("bootDisk") or {}).get("initializeParams") or {}
    price = machine_price(str(inputs.get("machineType")), region=region, spot=spot)
    size = disk.get("size")
    gib = int(size) if isinstance(size, (int, float)) else 0
    of_disk = disk_price(str(disk.get("type")), gib=gib, region=region) if gib else None
    return None if price is None or of_disk is None else price + of_disk.usd
