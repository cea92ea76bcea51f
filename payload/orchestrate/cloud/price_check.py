"""`doctor`'s check of the price: from the packaged tables, with their date."""

from __future__ import annotations

import time

from payload.cloud_prices import (
    READ_ON,
    age_days,
    disk_price,
    machine_price,
    nat_price,
    spot_warning,
)
from payload.orchestrate.cloud.need import Need
from payload.orchestrate.cloud.project_checks import Check


def check_price(need: Need) -> Check:
    """Return what the cluster costs an hour, or the parts whose price is not known."""
    spot = need.spot != "false"
    kind = "spot" if spot else "on demand"
    machine = machine_price(need.machine_type, region=need.region, spot=spot)
    disks = disk_price(need.disk_type, gib=need.disk_gib, region=need.region)
    nat = nat_price(nodes=need.node_count, region=need.region) if need.has_nat else 0.0
    unknown = [
        name
        for name, price in (
            (f"{need.machine_type} {kind} in {need.region}", machine),
            (f"{need.disk_type} disks in {need.region}", disks),
            (f"NAT in {need.region}", nat),
        )
        if price is None
    ]
    source = f"list prices of {READ_ON}, {age_days(time.time())} days old, packaged"
    if machine is None or disks is None or nat is None:
        return Check(
            name="price",
            outcome="unknown",
            found=f"no price is known of {', '.join(unknown)} ({source})",
            fix="Look: https://cloud.google.com/compute/all-pricing",
        )
    total = machine * need.node_count + disks.usd + nat
    bound = "at most " if disks.is_bound else ""
    found = (
        f"{bound}${total:.4f} an hour: {need.node_count} x ${machine:.6g} {kind}, disks "
        f"{bound}${disks.usd:.4f}, NAT ${nat:.4f} ({source})"
    )
    warning = spot_warning(time.time()) if spot else None
    if warning is not None:
        return Check(name="price", outcome="warning", found=found, fix=f"{warning}.")
    return Check(name="price", outcome="ok", found=found)
