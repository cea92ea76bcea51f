"""The cluster's cost: per hour, at most, and per million tokens, with a limit per hour."""

from __future__ import annotations

import time
from dataclasses import dataclass

from infra.config import ClusterConfig
from infra.measured import Speed
from payload.core.errors import BudgetError
from payload.pricing.cloud_prices import (
    Catalog,
    DiskPrice,
    disk_price,
    external_address_price,
    filestore_price,
    machine_price,
    nat_price,
    source,
    spot_warning,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Dollars an hour; None where a price is not known."""

    nodes: tuple[float | None, ...]
    """Each with its disk."""
    shared: float
    """NAT and external addresses."""
    known: float
    """The parts whose price is known."""
    unknown: tuple[str, ...]
    """Parts without a known price, in words."""
    filestore: float = 0.0
    """The Filestore instance, which costs until `pulumi destroy`."""
    bounds: tuple[str, ...] = ()
    """Parts counted at an upper bound of their price, in words."""

    @property
    def hourly_usd(self) -> float | None:
        """Return the whole cluster's hourly cost; None where a price is not known."""
        return None if self.unknown else self.known

    def most_usd(self, lifetime_s: int) -> float | None:
        """Return the most that machines that all start now can cost until their limit ends them."""
        return None if self.hourly_usd is None else self.hourly_usd * lifetime_s / 3600


def cluster_cost(
    config: ClusterConfig, *, spot: bool | None = None, catalog: Catalog | None = None
) -> Cost:
    """Return the settings' hourly cost; `spot` overrides the setting."""
    spot = config.uses_spot() if spot is None else spot
    price = machine_price(config.machine_type, region=config.region, spot=spot, catalog=catalog)
    kind = "spot" if spot else "on demand"
    unknown = [] if price is not None else [f"{config.machine_type} {kind} in {config.region}"]
    disks = [
        disk_price(
            config.boot_disk_type(),
            gib=config.boot_disk_gb(index=i),
            region=config.region,
            catalog=catalog,
        )
        for i in range(config.node_count)
    ]
    if None in disks:
        unknown.append(f"{config.boot_disk_type()} disks in {config.region}")
    if config.tier1:
        unknown.append("Tier_1 bandwidth")
    filestore = _filestore_price(config)
    if filestore is None:
        unknown.append(f"Filestore ({config.filestore_gb} GiB) in {config.region}")
    if config.confidential:
        unknown.append("confidential computing")
    shared = _shared_price(config)
    if shared is None:
        unknown.append(f"NAT and addresses in {config.region}")
    known_disks = [disk for disk in disks if disk is not None]
    return Cost(
        nodes=tuple(
            None if price is None or disk is None else round(price + disk.usd, 6) for disk in disks
        ),
        shared=shared or 0.0,
        known=round(
            (price or 0.0) * config.node_count
            + sum(disk.usd for disk in known_disks)
            + (shared or 0.0)
            + (filestore or 0.0),
            6,
        ),
        filestore=filestore or 0.0,
        unknown=tuple(unknown),
        bounds=_bounds(config, known_disks),
    )


def _shared_price(config: ClusterConfig) -> float | None:
    """Return dollars an hour of NAT and external addresses; None where one is not known."""
    parts = [
        nat_price(nodes=config.node_count, region=config.region) if config.egress == "nat" else 0.0,
        external_address_price(region=config.region) if config.access_mode == "direct" else 0.0,
    ]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _filestore_price(config: ClusterConfig) -> float | None:
    if config.shared_storage != "filestore":
        return 0.0
    return filestore_price(gib=config.filestore_gb, region=config.region)


def _bounds(config: ClusterConfig, disks: list[DiskPrice]) -> tuple[str, ...]:
    if not any(disk.is_bound for disk in disks):
        return ()
    return (f"{config.boot_disk_type()} disks at hyperdisk-extreme's price per GiB",)


def price_of_cluster(config: ClusterConfig, catalog: Catalog | None = None) -> Cost:
    """Return the cluster's cost. Raises BudgetError above maxHourlyUsd.

    With spot = auto, on-demand machines have to fit too: the operator may change to them.
    """
    cost = cluster_cost(config, catalog=catalog)
    cap = config.price_cap_usd()
    if cap is None:
        return cost
    dearest = cost
    if config.spot == "auto":
        dearest = cluster_cost(config, spot=False, catalog=catalog)
    if dearest.hourly_usd is None:
        raise BudgetError(
            f"tileforge:maxHourlyUsd = {cap:g} cannot be kept: no price is known here of "
            f"{', '.join(dearest.unknown)}. Look it up; to go on without a cap: "
            "pulumi config set maxHourlyUsd none"
        )
    if dearest.hourly_usd > cap:
        fallback = ", on demand after spot" if config.spot == "auto" else ""
        raise BudgetError(
            f"tileforge:maxHourlyUsd = {cap:g}, and {config.node_count} x {config.machine_type}"
            f"{fallback} cost ${dearest.hourly_usd:.2f} an hour. Take fewer or smaller machines, "
            f"or allow it: pulumi config set maxHourlyUsd {dearest.hourly_usd + 0.01:.2f}"
        )
    return cost


def describe(
    config: ClusterConfig, cost: Cost, *, speed: Speed | None, catalog: Catalog | None = None
) -> str:
    """The lines that `pulumi preview` prints."""
    kind = "spot" if config.uses_spot() else "on demand"
    what = f"{config.node_count} x {config.machine_type} {kind} in {config.zone}"
    if cost.hourly_usd is None:
        return (
            f"cost of {what}: not known, for want of a price of {', '.join(cost.unknown)}; "
            f"all else is ${cost.known:.4f} an hour; every machine ends after "
            f"{config.max_lifetime}"
        )
    most = cost.most_usd(config.max_lifetime_s() or 0)
    lines = [
        f"cost of {what}: ${cost.hourly_usd:.4f} an hour",
        f"NAT and addresses are ${cost.shared:.4f} of it; traffic, logs and the bucket are extra",
        f"at most ${most:.2f} until the limit of {config.max_lifetime} ends each machine",
        "a machine that replaces another one has the whole limit again",
    ]
    if config.spot == "auto":
        on_demand = cluster_cost(config, spot=False, catalog=catalog).hourly_usd
        price = "an unknown price" if on_demand is None else f"${on_demand:.4f} an hour"
        lines.append(f"on demand, where no spot machine is free: {price}")
    if cost.filestore:
        lines.append(
            f"Filestore ({config.filestore_gb} GiB) is ${cost.filestore:.4f} of it, until it is "
            "removed: no lifetime ends it"
        )
    if speed is not None:
        usd = usd_per_million_tokens(cost.hourly_usd, tokens_per_s=speed.tokens_per_s)
        lines.append(
            f"${usd:.4f} per million tokens at the {speed.tokens_per_s:,.0f} tokens/s of\n"
            f"  run {speed.run_id}"
        )
    lines += [f"counted at most: {bound}" for bound in cost.bounds]
    lines.append(f"prices: {source(catalog, time.time())}")
    warning = spot_warning(time.time()) if config.uses_spot() and catalog is None else None
    if warning is not None:
        lines.append(f"warning: {warning}")
    return "\n".join(lines)


def usd_per_million_tokens(hourly_usd: float, *, tokens_per_s: float) -> float:
    """Dollars for a million tokens of training."""
    return hourly_usd / (tokens_per_s * 3600) * 1e6
