"""Prices: Google's billing catalog, or the packaged tables if it is unavailable."""

from __future__ import annotations

import csv
import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from infra.config import ClusterConfig
from infra.cost import cost_of, describe, price_of_cluster
from payload.core.errors import BudgetError
from payload.machines.machine_types import machine_types
from payload.orchestrate.__main__ import main
from payload.orchestrate.commands.doctor import check_price
from payload.pricing.cloud_prices import CATALOG_FILE, CATALOG_LASTS_S, disk_price, read_catalog
from payload.stack.cloud_requirements import CloudRequirements
from tests.infra.stacks import ROOT
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.stacks import Capture
from tests.orchestrate.cloud.standin import REGION, ZONE, Fault

pytestmark = pytest.mark.processes

CONFIG = ClusterConfig(cluster="dev", project="my-project")


def sku(
    description: str,
    nanos: int,
    *,
    unit: str = "h",
    usage: str = "OnDemand",
    regions: tuple[str, ...] = (REGION,),
    free_first: bool = False,
) -> dict[str, Any]:
    """Return one entry of the catalog in its API's format."""
    tiers = [{"startUsageAmount": 0, "unitPrice": {"units": "0", "nanos": 0}}] * free_first
    price = {"currencyCode": "USD", "units": "0", "nanos": nanos}
    tiers.append({"startUsageAmount": 30 * free_first, "unitPrice": price})
    return {
        "skuId": "0000-0000-0000",
        "description": description,
        "category": {"resourceFamily": "Compute", "usageType": usage},
        "serviceRegions": list(regions),
        "pricingInfo": [{"pricingExpression": {"usageUnit": unit, "tieredRates": tiers}}],
    }


CATALOG = [
    sku("C3 Instance Core running in Iowa", 40_000_000),
    sku("C3 Instance Ram running in Iowa", 5_000_000, unit="GiBy.h"),
    sku("Spot Preemptible C3 Instance Core running in Iowa", 4_000_000, usage="Preemptible"),
    sku("Spot Preemptible C3 Instance Ram running in Iowa", 500_000, usage="Preemptible"),
    sku("Balanced PD Capacity", 110_000_000, unit="GiBy.mo", free_first=True),
    sku("Hyperdisk Balanced Capacity in Iowa", 80_000_000, unit="GiBy.mo"),
    # Entries that must not match.
    sku("Regional Balanced PD Capacity in Iowa", 990_000_000, unit="GiBy.mo"),
    sku("Commitment v1: C3 Cpu in Iowa for 1 Year", 990_000_000, usage="Commit1Yr"),
    sku("C3 Instance Core running in Iowa", 990_000_000, usage="Commit1Yr"),
    sku("C3D AMD Instance Core running in Iowa", 990_000_000),
    sku("C3 Sole Tenancy Instance Core running in Iowa", 990_000_000),
    sku("C3 Instance Core running in Frankfurt", 990_000_000, regions=("europe-west3",)),
]
# 8 vCPUs and 64 GiB.
MACHINE, SPOT = 0.64, 0.064


@pytest.fixture
def project(site: Site) -> Site:
    """Return a project that offers the default cluster's machine and disk."""
    for kind, name in (("machineTypes", "c3-highmem-8"), ("diskTypes", "pd-balanced")):
        site.cloud.add(kind, name, place=ZONE, labels={}, guestCpus=8)
    site.cloud.regions[REGION] = {"C3_CPUS": (100.0, 0.0), "SSD_TOTAL_GB": (500.0, 0.0)}
    site.cloud.page_size = 5
    return site


def price(site: Site, capsys: Capture, *flags: str) -> dict[str, Any]:
    """Return the check of the price."""
    main(["doctor", *flags, "--json"], site.env)
    checks = json.loads(capsys.readouterr().out)["checks"]
    (found,) = [each for each in checks if each["name"] == "price"]
    return dict(found)


def test_the_catalog_is_read_with_the_operators_login_and_kept(
    project: Site, capsys: Capture
) -> None:
    project.cloud.skus = CATALOG
    found = price(project, capsys)
    assert f"3 x ${MACHINE} on demand, disks ${300 * 0.11 / 730:.4f}" in found["found"]
    assert "(Google's billing catalog, read 0 h ago with your login)" in found["found"]
    assert found["outcome"] == "ok" and project.cloud.count("/skus") == 3
    # The catalog is used for a day; current spot prices have no warning about their age.
    found = price(project, capsys, "--spot", "--disk-type", "hyperdisk-balanced")
    assert f"3 x ${SPOT} spot, disks ${300 * 0.08 / 730:.4f}" in found["found"]
    assert found["outcome"] == "ok" and project.cloud.count("/skus") == 3
    # Preview shows the same prices, from the same file.
    catalog = read_catalog(project.folder / ".cluster", now_unix=time.time())
    cost = price_of_cluster(CONFIG, catalog)
    assert cost.nodes()[0] == pytest.approx(MACHINE + 100 * 0.11 / 730, abs=1e-6)
    assert "prices: Google's billing catalog, read 0 h ago" in describe(
        CONFIG, cost, speed=None, catalog=catalog
    )
    dear = replace(CONFIG, max_hourly_usd="1.80")
    price_of_cluster(dear)
    with pytest.raises(BudgetError, match=r"c3-highmem-8 cost \$1\.97 per hour"):
        price_of_cluster(dear, catalog)


def test_what_the_catalog_lacks_is_taken_from_the_packaged_tables(
    project: Site, capsys: Capture
) -> None:
    project.cloud.skus = CATALOG
    found = price(project, capsys, "--region", "europe-west3", "--zone", "europe-west3-a")
    # It only has the core's price in this region, so the machine's price is unknown.
    (row,) = [
        each
        for each in rows()
        if (each["machine_type"], each["region"]) == ("c3-highmem-8", "europe-west3")
    ]
    assert f"3 x ${row['usd_hour']} on demand" in found["found"] and found["outcome"] == "ok"


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda site: None, "Enable it: gcloud services enable cloudbilling.googleapis"),
        (
            lambda site: setattr(site.cloud, "skus", []),
            "no SKU matches a supported machine or disk type",
        ),
        (
            lambda site: site.cloud.faults.append(Fault(path="/skus", status=400, times=9)),
            "Google Cloud returned 400",
        ),
        (
            lambda site: setattr(site.cloud, "skus", [{"description": None}]),
            "billing catalog",
        ),
    ],
)
def test_without_the_catalog_the_packaged_prices_are_used_and_it_says_why(
    project: Site, capsys: Capture, prepare: Any, why: str
) -> None:
    prepare(project)
    found = price(project, capsys)
    assert "3 x $0.529232 on demand" in found["found"] and found["found"].endswith(
        "days old, packaged)"
    )
    assert found["fix"].startswith("Today's prices are not known: ") and why in found["fix"]
    assert not (project.folder / ".cluster" / CATALOG_FILE).exists()


def test_an_old_catalog_is_read_again_and_lasts_a_week(project: Site, capsys: Capture) -> None:
    project.cloud.skus = CATALOG
    price(project, capsys)
    path = project.folder / ".cluster" / CATALOG_FILE
    project.cloud.skus = None

    def aged(seconds: float) -> None:
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"read_unix": time.time() - seconds}))

    aged(50 * 3600)
    found = price(project, capsys)
    assert f"${MACHINE}" in found["found"]
    assert "catalog, read 50 h ago with your login)" in found["found"]
    assert "cloudbilling" in found["fix"]
    aged(CATALOG_LASTS_S + 60)
    assert "days old, packaged" in price(project, capsys)["found"]
    aged(-3600)  # from a clock that was ahead
    assert "days old, packaged" in price(project, capsys)["found"]
    path.write_text("[[[")
    assert "days old, packaged" in price(project, capsys)["found"]


def rows() -> list[dict[str, str]]:
    """Return every machine type in every region of the packaged table."""
    text = (ROOT / "payload/pricing/prices/machines.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.parametrize(("column", "spot"), [("usd_hour", "false"), ("usd_hour_spot", "true")])
def test_doctor_has_the_files_price_of_every_type_in_every_region(column: str, spot: Any) -> None:
    known = 0
    for row in rows():
        machine, region = row["machine_type"], row["region"]
        need = CloudRequirements(
            machine_type=machine, region=region, node_count=1, disk_gib=100, spot=spot
        )
        check = check_price(need, None)
        if not row[column] or disk_price(need.disk_type, gib=100, region=region) is None:
            assert check.outcome == "unknown" and "no known price for" in check.found
            continue
        known += 1
        (figure,) = re.findall(r"1 x \$([0-9.e-]+) ", check.found)
        assert float(figure) == float(row[column]), (machine, region)
        assert check.outcome in ("ok", "warning")
    assert known > 3_000


def test_preview_has_the_files_price_of_every_type_in_every_region() -> None:
    known, requestable = 0, {each.name for each in machine_types()}
    for row in rows():
        machine, region = row["machine_type"], row["region"]
        if machine not in requestable:
            continue
        config = replace(CONFIG, machine_type=machine, region=region, node_count=1)
        config = replace(config, zones=(f"{region}-a",), max_hourly_usd="none")
        disk = disk_price(config.boot_disk_type(), gib=100, region=region)
        cost = cost_of(config)
        assert disk is not None and cost.unknown == (), (machine, region)
        assert cost.nodes()[0] == round(float(row["usd_hour"]) + disk.usd, 6), (machine, region)
        known += 1
    assert known > 1_500
