"""Reads list prices from Google's billing catalog, once a day."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from payload.core.errors import TileforgeError
from payload.core.files import write_whole
from payload.core.validation.fields import checked
from payload.orchestrate.clouds.gcp.client import Google
from payload.pricing.cloud_prices import CATALOG_FILE, Catalog, catalog_text, rate_key, read_catalog

# Compute Engine's service ID in the catalog:
# cloud.google.com/billing/docs/reference/rest/v1/services
_SKUS = "/v1/services/6F81-5844-456A/skus?currencyCode=USD&pageSize=5000"
_FRESH_S = 86_400.0
_MACHINE = re.compile(
    r"(?P<spot>Spot Preemptible )?(?P<family>C3|C4|N4|H3) Instance (?P<part>Core|Ram) running in "
)
_DISK = re.compile(r"(Balanced PD|SSD backed PD|Storage PD|Hyperdisk Balanced) Capacity(?: in .*)?")
_DISK_TYPES = {
    "Balanced PD": "pd-balanced",
    "SSD backed PD": "pd-ssd",
    "Storage PD": "pd-standard",
    "Hyperdisk Balanced": "hyperdisk-balanced",
}
_UNITS = {"h": "hour", "GiBy.h": "hour", "GiBy.mo": "month"}
_INTEGER = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Price:
    currency: str = checked("USD", key="currencyCode")
    units: str = checked("0", pattern=_INTEGER, wanted="an integer as text")
    nanos: int = checked(0, low=0, high=10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rate:
    unit_price: _Price = checked(key="unitPrice")  # noqa: RUF009  # declares a field


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expression:
    unit: str = checked("", key="usageUnit")
    rates: tuple[_Rate, ...] = checked((), key="tieredRates")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pricing:
    expression: _Expression = checked(key="pricingExpression")  # noqa: RUF009  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Category:
    usage: str = checked("", key="usageType")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sku:
    """A SKU: https://cloud.google.com/billing/docs/reference/rest/v1/services.skus#Sku."""

    description: str
    category: _Category
    regions: tuple[str, ...] = checked((), key="serviceRegions")
    pricing: tuple[_Pricing, ...] = checked((), key="pricingInfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    skus: tuple[_Sku, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


def fresh_catalog(google: Google, *, folder: Path) -> tuple[Catalog | None, str]:
    """Return the price catalog, and the error if it could not be refreshed.

    The cached catalog in `folder` is refreshed after a day. If the refresh fails, the cached
    catalog is used for up to a week.
    """
    now_unix = time.time()
    kept = read_catalog(folder, now_unix=now_unix)
    if kept is not None and now_unix - kept.read_unix < _FRESH_S:
        return kept, ""
    try:
        pages = google.get_pages("cloudbilling", _SKUS, what="billing catalog", shape=_Page)
        rates = {key: usd for page in pages for sku in page.skus for key, usd in _rates(sku)}
    except TileforgeError as error:
        return kept, str(error)
    if not rates:
        return kept, "billing catalog: no SKU matches a supported machine or disk type."
    catalog = Catalog(read_unix=now_unix, rates=rates)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(folder / CATALOG_FILE, catalog_text(catalog))
    return catalog, ""


def _rates(sku: _Sku) -> Iterator[tuple[str, float]]:
    """Yield each rate key with its dollars; yield nothing for a SKU that clusters do not use."""
    machine, disk = _MACHINE.match(sku.description), _DISK.fullmatch(sku.description)
    if machine is not None:
        spot = machine["spot"] is not None
        usage, per = ("Preemptible" if spot else "OnDemand"), "hour"
        what = f"{machine['family'].lower()} {machine['part'].lower()}"
    elif disk is not None:
        spot, usage, per, what = False, "OnDemand", "month", _DISK_TYPES[disk[1]]
    else:
        return
    if sku.category.usage != usage or not sku.pricing:
        return
    expression = sku.pricing[0].expression
    if _UNITS.get(expression.unit) != per or not expression.rates:
        return
    # Use the last tier, because the first tier of some SKUs is the monthly free amount.
    price = expression.rates[-1].unit_price
    if price.currency == "USD":
        for region in sku.regions:
            usd = int(price.units) + price.nanos / 1e9
            yield rate_key(what, region=region, spot=spot), usd
