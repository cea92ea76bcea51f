"""Computes the cluster's cost per hour, in total and per million tokens; checks the hourly
limit."""

from __future__ import annotations

import time

from infra.config import ClusterConfig
from infra.last_measured_speed import Speed
from payload.core.errors import BudgetError
from payload.pricing.cloud_prices import Catalog, source, spot_warning
from payload.pricing.cluster_cost import BilledResources, Cost, cluster_cost
from payload.stack.billed_resources import BILLED_ON
from payload.stack.cloud_requirements import UNLISTED


def cost_of(
    config: ClusterConfig, *, spot: bool | None = None, catalog: Catalog | None = None
) -> Cost:
    """Return the hourly cost of the settings; `spot` overrides the setting."""
    surcharges = {"tier1": config.tier1, "confidential": config.confidential}
    billed = BilledResources(
        machine_type=config.machine_type,
        node_count=config.node_count,
        region=config.region,
        spot=config.uses_spot() if spot is None else spot,
        disk_type=config.boot_disk_type(),
        disks_gib=tuple(config.boot_disk_gb(index=i) for i in range(config.node_count)),
        has_nat=config.egress == "nat",
        has_external_address=config.access_mode == "direct",
        filestore_gib=config.filestore_gb if config.shared_storage == "filestore" else 0,
        unlisted=tuple(UNLISTED[key] for key, is_on in surcharges.items() if is_on),
    )
    return cluster_cost(billed, catalog=catalog)


def price_of_cluster(config: ClusterConfig, catalog: Catalog | None = None) -> Cost:
    """Return the cluster's cost. Raises BudgetError above maxHourlyUsd.

    With spot = auto, the price of on-demand machines must also be below the limit, because `up` can
    switch to on-demand machines.
    """
    cost = cost_of(config, catalog=catalog)
    cap = config.price_cap_usd()
    if cap is None:
        return cost
    highest = cost
    if config.spot == "auto":
        highest = cost_of(config, spot=False, catalog=catalog)
    if highest.hourly_usd is None:
        raise BudgetError(
            f"tileforge:maxHourlyUsd = {cap:g}: cannot be checked, because the price of "
            f"{', '.join(highest.unknown)} is unknown. To continue without a limit: "
            "pulumi config set maxHourlyUsd none"
        )
    if highest.hourly_usd > cap:
        fallback = " (on demand, after spot)" if config.spot == "auto" else ""
        raise BudgetError(
            f"tileforge:maxHourlyUsd = {cap:g}, but {config.node_count} x "
            f"{config.machine_type}{fallback} cost ${highest.hourly_usd:.2f} per hour. Use fewer "
            "or smaller machines, or raise the limit: pulumi config set maxHourlyUsd "
            f"{highest.hourly_usd + 0.01:.2f}"
        )
    return cost


def describe(
    config: ClusterConfig, cost: Cost, *, speed: Speed | None, catalog: Catalog | None = None
) -> str:
    """Return the cost summary that `pulumi preview` prints."""
    kind = "spot" if config.uses_spot() else "on demand"
    what = f"{config.node_count} x {config.machine_type} {kind} in {config.zone}"
    if cost.hourly_usd is None:
        return (
            f"cost of {what}: unknown, because there is no known price for "
            f"{', '.join(cost.unknown)}; the rest costs ${cost.known:.4f} an hour; every machine "
            f"ends after {config.max_lifetime}; {BILLED_ON}"
        )
    most = cost.most_usd(config.max_lifetime_s() or 0)
    lines = [
        f"cost of {what}: ${cost.hourly_usd:.4f} an hour",
        f"${cost.shared:.4f} of this is for NAT and addresses; traffic, logs and the bucket are "
        "extra",
        f"at most ${most:.2f} until the limit of {config.max_lifetime} ends each machine",
        BILLED_ON,
        "a machine that replaces another machine has the full limit again",
    ]
    if config.spot == "auto":
        on_demand = cost_of(config, spot=False, catalog=catalog).hourly_usd
        price = "an unknown price" if on_demand is None else f"${on_demand:.4f} an hour"
        lines.append(f"on demand, if no spot machine is free: {price}")
    if cost.filestore:
        lines.append(
            f"${cost.filestore:.4f} of this is for Filestore ({config.filestore_gb} GiB), billed "
            "until you remove it"
        )
    if speed is not None:
        usd = usd_per_million_tokens(cost.hourly_usd, tokens_per_s=speed.tokens_per_s)
        lines.append(
            f"${usd:.4f} per million tokens at {speed.tokens_per_s:,.0f} tokens/s, measured in\n"
            f"  run {speed.run_id}"
        )
    lines += [f"upper bound: {bound}" for bound in cost.bounds]
    lines.append(f"prices: {source(catalog, time.time())}")
    warning = spot_warning(time.time()) if config.uses_spot() and catalog is None else None
    if warning is not None:
        lines.append(f"warning: {warning}")
    return "\n".join(lines)


def usd_per_million_tokens(hourly_usd: float, *, tokens_per_s: float) -> float:
    """Return the dollars per million training tokens."""
    return hourly_usd / (tokens_per_s * 3600) * 1e6
