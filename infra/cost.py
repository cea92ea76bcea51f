"""The cluster's cost: per hour, at most, and per million tokens, with a limit per hour."""

from __future__ import annotations

import time

from infra.config import ClusterConfig
from infra.measured import Speed
from payload.core.errors import BudgetError
from payload.pricing.cloud_prices import Catalog, source, spot_warning
from payload.pricing.cluster_cost import Billed, Cost, cluster_cost
from payload.stack.cloud_requirements import UNLISTED


def cost_of(
    config: ClusterConfig, *, spot: bool | None = None, catalog: Catalog | None = None
) -> Cost:
    """Return the settings' hourly cost; `spot` overrides the setting."""
    asked = {"tier1": config.tier1, "confidential": config.confidential}
    billed = Billed(
        machine_type=config.machine_type,
        node_count=config.node_count,
        region=config.region,
        spot=config.uses_spot() if spot is None else spot,
        disk_type=config.boot_disk_type(),
        disks_gib=tuple(config.boot_disk_gb(index=i) for i in range(config.node_count)),
        has_nat=config.egress == "nat",
        has_external_address=config.access_mode == "direct",
        filestore_gib=config.filestore_gb if config.shared_storage == "filestore" else 0,
        unlisted=tuple(UNLISTED[key] for key, is_asked in asked.items() if is_asked),
    )
    return cluster_cost(billed, catalog=catalog)


def price_of_cluster(config: ClusterConfig, catalog: Catalog | None = None) -> Cost:
    """Return the cluster's cost. Raises BudgetError above maxHourlyUsd.

    With spot = auto, on-demand machines have to fit too: the operator may change to them.
    """
    cost = cost_of(config, catalog=catalog)
    cap = config.price_cap_usd()
    if cap is None:
        return cost
    dearest = cost
    if config.spot == "auto":
        dearest = cost_of(config, spot=False, catalog=catalog)
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
        on_demand = cost_of(config, spot=False, catalog=catalog).hourly_usd
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
