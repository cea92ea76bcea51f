"""The hourly cost of a cluster: its machines, disks, addresses and shared folder."""

from __future__ import annotations

from dataclasses import dataclass, replace

from payload.pricing.cloud_prices import (
    Catalog,
    DiskPrice,
    disk_price,
    external_address_price,
    filestore_price,
    machine_price,
    nat_price,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BilledResources:
    """Resources of a cluster that are billed by the hour, without traffic, logs and buckets."""

    machine_type: str
    node_count: int
    region: str
    spot: bool
    disk_type: str
    disks_gib: tuple[int, ...]
    """Sizes of the boot disks: one size per node, or a single sum."""
    has_nat: bool = False
    has_external_address: bool = False
    filestore_gib: int = 0
    """Size of the Filestore instance; 0 for none."""
    unlisted: tuple[str, ...] = ()
    """Billed resources without a price in the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Costs in dollars per hour; None if a price is unknown."""

    machine: float | None
    """Cost of one machine without its disk."""
    disks: tuple[DiskPrice | None, ...]
    nat: float | None
    address: float | None
    filestore: float | None
    """Cost of the Filestore instance, which is billed until `pulumi destroy`."""
    known: float
    """Sum of the known prices."""
    unknown: tuple[str, ...]
    """Descriptions of the resources without a known price."""
    bounds: tuple[str, ...]
    """Descriptions of the resources whose price is an upper bound."""

    @property
    def hourly_usd(self) -> float | None:
        """Return the cluster's hourly cost, or None if a price is unknown."""
        return None if self.unknown else self.known

    @property
    def shared(self) -> float:
        """Return the known cost of NAT and external addresses."""
        return (self.nat or 0.0) + (self.address or 0.0)

    @property
    def disks_usd(self) -> float:
        """Return the known cost of all disks."""
        return sum(disk.usd for disk in self.disks if disk is not None)

    def nodes(self) -> tuple[float | None, ...]:
        """Return the cost of each node with its disk."""
        return tuple(
            None if self.machine is None or disk is None else round(self.machine + disk.usd, 6)
            for disk in self.disks
        )

    def most_usd(self, lifetime_s: int) -> float | None:
        """Return the cost until the lifetime limit if all machines start now."""
        return None if self.hourly_usd is None else self.hourly_usd * lifetime_s / 3600


def cluster_cost(billed: BilledResources, *, catalog: Catalog | None = None) -> Cost:
    """Return the hourly cost of the resources."""
    region, kind = billed.region, "spot" if billed.spot else "on demand"
    machine = machine_price(billed.machine_type, region=region, spot=billed.spot, catalog=catalog)
    disks = tuple(
        disk_price(billed.disk_type, gib=gib, region=region, catalog=catalog)
        for gib in billed.disks_gib
    )
    nat = nat_price(nodes=billed.node_count, region=region) if billed.has_nat else 0.0
    address = external_address_price(region=region) if billed.has_external_address else 0.0
    filestore: float | None = 0.0
    if billed.filestore_gib:
        filestore = filestore_price(gib=billed.filestore_gib, region=region)
    parts = (
        (f"{billed.machine_type} {kind} in {region}", machine is None),
        (f"{billed.disk_type} disks in {region}", None in disks),
        *((each, True) for each in billed.unlisted),
        (f"Filestore ({billed.filestore_gib} GiB) in {region}", filestore is None),
        (f"NAT and addresses in {region}", None in (nat, address)),
    )
    bounded = any(disk is not None and disk.is_upper_bound for disk in disks)
    cost = Cost(
        machine=machine,
        disks=disks,
        nat=nat,
        address=address,
        filestore=filestore,
        known=0.0,
        unknown=tuple(name for name, is_unknown in parts if is_unknown),
        bounds=(f"{billed.disk_type} disks at hyperdisk-extreme's price per GiB",)
        if bounded
        else (),
    )
    known = (machine or 0.0) * billed.node_count + cost.disks_usd + cost.shared + (filestore or 0.0)
    return replace(cost, known=round(known, 6))
