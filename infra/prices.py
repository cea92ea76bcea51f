"""Google's list prices, each with its source. What is not here is not known, and never guessed."""

from __future__ import annotations

from dataclasses import dataclass

from infra.machines import MachineType

READ_ON = "2026-11-21"
"""When the sources were read."""

SOURCES = {
    "machines": "SkyPilot's catalog, catalogs/v8/gcp/vms.csv at commit 006059e0",
    "nat": "https://cloud.google.com/nat/pricing",
    "disks": "https://cloud.google.com/compute/disks-image-pricing (pd-ssd, from its example of "
    "200 GB); https://c3x.dev/blog/gcp-persistent-disk-types-cost (pd-balanced)",
}

HOURS_A_MONTH = 730.0

# us-central1, dollars an hour: on demand, spot. Rows of the catalog.
_LISTED: dict[str, tuple[float | None, float | None]] = {
    "c3-highmem-8": (0.52923, 0.08501),
    "c3-highmem-44": (2.91078, 0.46754),
    "c3-highmem-88": (5.82155, 0.93509),
    "c3-standard-88": (4.43538, 0.69326),
    "c3-standard-176": (8.87075, 1.38653),
    "c4-highmem-192": (12.51254, 5.95651),
}
# Of c3-highmem-8 in other regions; 'spot' alone.
_SPOT_ELSEWHERE = {
    "us-south1": 0.06099,
    "us-east1": 0.08501,
    "us-west1": 0.08501,
    "us-east5": 0.12942,
    "us-east4": 0.1848,
    "us-west3": 0.26253,
    "asia-southeast1": 0.31011,
}
# Dollars per vCPU and per GiB an hour, which the listed rows of C3 are sums of. C4's on-demand row
# is the same sum; its spot row is not, so nothing is computed for it.
_UNIT = {"on_demand": (0.034650, 0.003938), "spot": (0.005130, 0.000687)}
_COMPUTED = {"c3": ("on_demand", "spot"), "c4": ("on_demand",)}

_DISK_GIB_MONTH = {"pd-balanced": 0.10, "pd-ssd": 0.17}
"""us-central1. Hyperdisk's is left out: the sources that could be read contradict each other."""
_NAT_PER_NODE, _NAT_MOST, _EXTERNAL_ADDRESS = 0.0014, 0.044, 0.005


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars an hour."""

    usd: float
    computed: bool
    """From the prices per vCPU and GiB, where the source has no row of its own."""


def machine_price(machine: MachineType, *, region: str, spot: bool) -> Price | None:
    """Of one machine without its disk, or None when it is not known."""
    if region != "us-central1":
        elsewhere = _SPOT_ELSEWHERE.get(region) if machine.name == "c3-highmem-8" else None
        return Price(elsewhere, computed=False) if spot and elsewhere else None
    listed = _LISTED.get(machine.name, (None, None))[int(spot)]
    if listed is not None:
        return Price(listed, computed=False)
    kind = "spot" if spot else "on_demand"
    if kind not in _COMPUTED.get(machine.family, ()):
        return None
    per_vcpu, per_gib = _UNIT[kind]
    return Price(machine.vcpus * per_vcpu + machine.memory_gib * per_gib, computed=True)


def disk_price(disk_type: str, *, gib: int, region: str) -> float | None:
    """Dollars an hour of one disk, or None when it is not known."""
    per_month = _DISK_GIB_MONTH.get(disk_type) if region == "us-central1" else None
    return None if per_month is None else gib * per_month / HOURS_A_MONTH


def nat_price(*, nodes: int) -> float:
    """Dollars an hour of Cloud NAT and its address, without traffic; the same in all regions."""
    return min(nodes * _NAT_PER_NODE, _NAT_MOST) + _EXTERNAL_ADDRESS


def external_address_price() -> float:
    """Dollars an hour of a node's external address."""
    return _EXTERNAL_ADDRESS
