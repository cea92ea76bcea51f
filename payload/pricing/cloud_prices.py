"""Google's list prices. A price that is not listed is unknown, and never estimated.

Prices come from Google's billing catalog if the catalog was read within the last week. Otherwise
they come from the packaged tables.

The tables, prices/*.csv, have the facts of pricing.yml in
Cyclenerd/google-cloud-pricing-cost-calculator (Apache-2.0) at commit fd66b26. READ_ON is the date
on which pricing.yml was generated from Google's billing catalog.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build, check_schema

READ_ON = "2026-07-30"
"""Date of the prices in the packaged tables."""
SPOT_CHANGES_AFTER_DAYS = 31
"""Days after which spot prices may be out of date: Google changes them up to once a month."""
HOURS_A_MONTH = 730.0
CATALOG_FILE = "prices.json"
"""File name in a project's folder .cluster."""
CATALOG_LASTS_S = 7 * 86_400.0
_CATALOG_VERSION = 1

_FOLDER = Path(__file__).resolve().parent / "prices"
# The table has only the price of hyperdisk-extreme; a GiB of hyperdisk-balanced costs less. The
# 3,000 IOPS and 140 MiB/s that the cluster program requests are free.
_BOUNDED_BY = {"hyperdisk-balanced": "hyperdisk-extreme"}
# Dollars an hour: https://cloud.google.com/nat/pricing; the same in all regions.
_NAT_PER_NODE, _NAT_MOST = 0.0014, 0.044
# Dollars a month for a GiB of the zonal tier. Google documents only this region's price, $256.00
# for 1 TiB. https://cloud.google.com/filestore/docs/service-tiers
_FILESTORE_GIB_MONTH = {"us-central1": 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    on_demand: float | None
    spot: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPrice:
    """Price of one disk in dollars per hour."""

    usd: float
    is_upper_bound: bool
    """True if the price is an upper bound, from a more expensive type of disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Prices of Google's billing catalog, read with the operator's login."""

    read_unix: float = checked(low=0, high=1e11)
    rates: Mapping[str, float] = checked(low=0, high=1e4)
    """Dollars by `rate_key`: per hour for a vCPU or GiB of memory, per month for a GiB of disk."""

    def machine(self, name: str, *, region: str, spot: bool) -> float | None:
        """Return a machine's price in dollars an hour, or None if a rate is missing."""
        shape = _shapes().get(name)
        if shape is None:
            return None
        family, (vcpus, memory_gib) = name.partition("-")[0], shape
        core = self.rates.get(rate_key(f"{family} core", region=region, spot=spot))
        ram = self.rates.get(rate_key(f"{family} ram", region=region, spot=spot))
        return None if core is None or ram is None else round(core * vcpus + ram * memory_gib, 9)


def rate_key(what: str, *, region: str, spot: bool = False) -> str:
    """Return the key of a rate: `c3 core us-central1 spot`, `pd-balanced europe-west4`."""
    return f"{what} {region}{' spot' if spot else ''}"


def read_catalog(folder: Path, *, now_unix: float) -> Catalog | None:
    """Return the catalog saved in `folder`, or None if it is missing, invalid or too old."""
    path = folder / CATALOG_FILE
    try:
        raw = parse_json(read_bytes(path), where=str(path))
        check_schema(raw, _CATALOG_VERSION, where=str(path))
        catalog = build(Catalog, raw, where=str(path))
    except (OSError, ConfigError):
        return None
    return catalog if 0 <= now_unix - catalog.read_unix <= CATALOG_LASTS_S else None


def catalog_text(catalog: Catalog) -> str:
    """Return the text of CATALOG_FILE."""
    document = {"schema_version": _CATALOG_VERSION, "read_unix": catalog.read_unix}
    return json.dumps(document | {"rates": dict(catalog.rates)})


def source(catalog: Catalog | None, now_unix: float) -> str:
    """Return the source and the age of prices as text."""
    if catalog is None:
        return f"list prices of {READ_ON}, {age_days(now_unix)} days old, packaged"
    hours = (now_unix - catalog.read_unix) / 3600
    return f"Google's billing catalog, read {hours:.0f} h ago with your login"


def machine_price(
    name: str, *, region: str, spot: bool, catalog: Catalog | None = None
) -> float | None:
    """Return the dollars per hour for one machine without its disk, or None if unknown."""
    found = catalog.machine(name, region=region, spot=spot) if catalog is not None else None
    if found is not None:
        return found
    row = _machines().get((name, region))
    if row is None:
        return None
    return row.spot if spot else row.on_demand


def disk_price(
    disk_type: str, *, gib: int, region: str, catalog: Catalog | None = None
) -> DiskPrice | None:
    """Return the price of one disk, or None if unknown."""
    rate = catalog.rates.get(rate_key(disk_type, region=region)) if catalog is not None else None
    if rate is not None:
        return DiskPrice(usd=gib * rate / HOURS_A_MONTH, is_upper_bound=False)
    named = _BOUNDED_BY.get(disk_type, disk_type)
    per_month = _others().get((named, region))
    if per_month is None:
        return None
    return DiskPrice(usd=gib * per_month / HOURS_A_MONTH, is_upper_bound=named != disk_type)


def nat_price(*, nodes: int, region: str) -> float | None:
    """Return the dollars per hour for Cloud NAT and its address, without traffic.

    Returns None if a price is unknown.
    """
    address = external_address_price(region=region)
    return None if address is None else min(nodes * _NAT_PER_NODE, _NAT_MOST) + address


def filestore_price(*, gib: int, region: str) -> float | None:
    """Return the dollars per hour for a zonal Filestore instance, or None if unknown."""
    per_month = _FILESTORE_GIB_MONTH.get(region)
    return None if per_month is None else gib * per_month / HOURS_A_MONTH


def bucket_price(*, region: str) -> float | None:
    """Return the dollars per month for a GiB in a Standard bucket, or None if unknown."""
    return _others().get(("bucket standard", region))


def external_address_price(*, region: str) -> float | None:
    """Return the dollars per hour for an external address in use, or None if unknown."""
    return _others().get(("external address vm", region))


def listed_machines() -> Iterator[tuple[str, str]]:
    """Yield the machine type and region of every listed price."""
    yield from _machines()


def age_days(now_unix: float) -> int:
    """Return the age of the packaged tables in days."""
    return (datetime.fromtimestamp(now_unix, UTC).date() - date.fromisoformat(READ_ON)).days


def spot_warning(now_unix: float) -> str | None:
    """Return a warning if the packaged spot prices are older than a month, otherwise None."""
    days = age_days(now_unix)
    if days <= SPOT_CHANGES_AFTER_DAYS:
        return None
    return (
        f"spot prices were read on {READ_ON}, {days} days ago, and change every month: see "
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
def _shapes() -> dict[str, tuple[int, float]]:
    """Return the vCPUs and the GiB of memory of each machine type."""
    return {
        row["machine_type"]: (int(row["vcpus"]), float(row["memory_gib"]))
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
