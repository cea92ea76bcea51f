"""Google's list prices from the packaged tables. What is not there is not known, and never guessed.

payload/prices/*.csv: facts of pricing.yml of Cyclenerd/google-cloud-pricing-cost-calculator
(Apache-2.0) at commit fd66b26, generated from Google's billing catalog on READ_ON.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path

READ_ON = "2026-07-30"
"""When the tables were made from Google's catalog."""
SPOT_CHANGES_AFTER_DAYS = 31
"""Google changes spot prices up to once a month."""
HOURS_A_MONTH = 730.0

_FOLDER = Path(__file__).resolve().parent / "prices"
# Google bills hyperdisk-balanced by GiB less than hyperdisk-extreme, whose price the table has; the
# 3,000 IOPS and 140 MiB/s that the cluster program asks for are free.
_BOUNDED_BY = {"hyperdisk-balanced": "hyperdisk-extreme"}
# https://cloud.google.com/nat/pricing; the same in all regions.
_NAT_PER_NODE, _NAT_MOST = 0.0014, 0.044


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    on_demand: float | None
    spot: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPrice:
    """Dollars an hour of one disk."""

    usd: float
    is_bound: bool
    """It costs at most this: its own price is not in the table, that of a dearer one is."""


def machine_price(name: str, *, region: str, spot: bool) -> float | None:
    """Return dollars an hour of one machine without its disk, or None when it is not known."""
    row = _machines().get((name, region))
    if row is None:
        return None
    return row.spot if spot else row.on_demand


def disk_price(disk_type: str, *, gib: int, region: str) -> DiskPrice | None:
    """Return the price of one disk, or None when it is not known."""
    named = _BOUNDED_BY.get(disk_type, disk_type)
    per_month = _others().get((named, region))
    if per_month is None:
        return None
    return DiskPrice(usd=gib * per_month / HOURS_A_MONTH, is_bound=named != disk_type)


def nat_price(*, nodes: int, region: str) -> float | None:
    """Return dollars an hour of Cloud NAT and its address, without traffic; None: not known."""
    address = external_address_price(region=region)
    return None if address is None else min(nodes * _NAT_PER_NODE, _NAT_MOST) + address


def external_address_price(*, region: str) -> float | None:
    """Return dollars an hour of an external address in use, or None when it is not known."""
    return _others().get(("external address vm", region))


def listed_machines() -> Iterator[tuple[str, str]]:
    """Yield the machine type and region of every row."""
    yield from _machines()


def age_days(now_unix: float) -> int:
    """Return how old the tables are."""
    return (datetime.fromtimestamp(now_unix, UTC).date() - date.fromisoformat(READ_ON)).days


def spot_warning(now_unix: float) -> str | None:
    """Return a warning where the spot prices are older than a month, or None."""
    days = age_days(now_unix)
    if days <= SPOT_CHANGES_AFTER_DAYS:
        return None
    return (
        f"spot prices are those of {READ_ON}, {days} days ago, and change every month: see "
        "https://cloud.google.com/spot-vms/pricing"
    )


@cache
def _machines() -> dict[tuple[str, str], _Machine]:
    return {
        (row["machine_type"], row["region"]): _Machine(
            on_demand=_usd(row["usd_hour"]), spot=_usd(row["usd_hour_spot"])
        )
        for row in _rows("machines.csv")
    }


@cache
def _others() -> dict[tuple[str, str], float]:
    return {(row["what"], row["region"]): float(row["usd"]) for row in _rows("other.csv")}


def _rows(name: str) -> list[dict[str, str]]:
    with (_FOLDER / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _usd(text: str) -> float | None:
    return float(text) if text else None
