"""Counts the nodes among a stack's resources and checks the limit of cost per hour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infra.gcp.security_checks import Resource
from payload.pricing.cloud_prices import filestore_price
from payload.pricing.cluster_cost import BilledResources, cluster_cost

_MACHINE = "gcp:compute/instance:Instance"
_FILESTORE = "gcp:filestore/instance:Instance"


def number_of_nodes(resources: Sequence[Resource]) -> int:
    """Return the number of machines among these resources."""
    return len(_instances(resources))


def cost_problems(resources: Sequence[Resource], *, most_usd: float) -> Iterator[str]:
    """Yield a problem if machines, disks and Filestore can cost over `most_usd` per hour."""
    folders = [found for found in resources if str(found["type"]) == _FILESTORE]
    prices = {str(found["name"]): _price(found) for found in _instances(resources)}
    prices |= {str(found["name"]): _filestore_price(found) for found in folders}
    unknown = sorted(name for name, price in prices.items() if price is None)
    if unknown:
        yield f"{', '.join(unknown)}: unknown price, so the limit of ${most_usd:g}/h is unchecked"
    total = sum(price or 0.0 for price in prices.values())
    if total > most_usd:
        what = "machines, disks and Filestore" if folders else "machines and disks"
        yield f"{what} cost ${total:.2f} per hour, more than the limit of ${most_usd:g}"


def _instances(resources: Sequence[Resource]) -> list[Resource]:
    return [found for found in resources if str(found["type"]) == _MACHINE]


def _price(instance: Resource) -> float | None:
    inputs = instance["inputs"]
    region = str(inputs.get("zone", "")).rpartition("-")[0]
    spot = (inputs.get("scheduling") or {}).get("provisioningModel") == "SPOT"
    disk = (inputs.get("bootDisk") or {}).get("initializeParams") or {}
    size = disk.get("size")
    if not isinstance(size, (int, float)) or not size:
        return None
    billed = BilledResources(
        machine_type=str(inputs.get("machineType")),
        node_count=1,
        region=region,
        spot=spot,
        disk_type=str(disk.get("type")),
        disks_gib=(int(size),),
    )
    return cluster_cost(billed).hourly_usd


def _filestore_price(instance: Resource) -> float | None:
    inputs = instance["inputs"]
    region = str(inputs.get("location", "")).rpartition("-")[0]
    size = (inputs.get("fileShares") or {}).get("capacityGb")
    gib = int(size) if isinstance(size, (int, float)) else 0
    return filestore_price(gib=gib, region=region) if gib else None
