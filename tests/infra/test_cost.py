"""Prices: summed from the list, limited, and never guessed."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from infra.config import ClusterConfig
from infra.cost import cost_of, describe, price_of_cluster, usd_per_million_tokens
from infra.last_measured_speed import Speed, last_measured_speed
from payload.core.errors import BudgetError
from payload.machines.machine_types import machine_types
from payload.pricing import cloud_prices
from payload.pricing.cloud_prices import disk_price, machine_price, spot_warning
from tests.infra.stacks import ROOT

CONFIG = ClusterConfig(cluster="dev", project="my-project")


def test_the_default_cluster_is_machines_disks_and_nat() -> None:
    cost = cost_of(CONFIG)
    machines, disks, nat = 3 * 0.529232, 3 * 100 * 0.10 / 730, 3 * 0.0014 + 0.005
    assert cost.hourly_usd == pytest.approx(machines + disks + nat, abs=1e-6)
    assert cost.most_usd(12 * 3600) == pytest.approx(12 * (machines + disks + nat), abs=1e-4)


def test_three_spot_machines_cost_a_quarter() -> None:
    spot = cost_of(replace(CONFIG, spot="true"))
    assert spot.nodes()[0] == pytest.approx(0.12968 + 100 * 0.10 / 730, abs=1e-6)


def test_a_head_with_a_larger_disk_and_an_address_costs_more() -> None:
    plain = cost_of(replace(CONFIG, egress="none")).hourly_usd
    direct = replace(CONFIG, egress="none", access_mode="direct", head_disk_gb=200)
    assert plain is not None
    assert cost_of(direct).hourly_usd == pytest.approx(plain + 0.005 + 100 * 0.10 / 730, abs=2e-6)


def rows(name: str) -> list[dict[str, str]]:
    """Return the lines of a packaged table."""
    text = (ROOT / "payload/pricing/prices" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def test_every_machine_of_the_table_has_the_tables_price_in_every_region() -> None:
    table = rows("machines.csv")
    assert len(table) > 3_500
    for row in table:
        for column, spot in (("usd_hour", False), ("usd_hour_spot", True)):
            found = machine_price(row["machine_type"], region=row["region"], spot=spot)
            assert found == (float(row[column]) if row[column] else None)
    # This row is confirmed by other sources.
    assert machine_price("c3-highmem-8", region="us-central1", spot=False) == pytest.approx(
        0.5292, abs=1e-4
    )


def test_every_machine_that_may_be_asked_for_has_a_price_wherever_it_is_sold() -> None:
    sold = set(cloud_prices.listed_machines())
    for machine in machine_types():
        regions = {region for name, region in sold if name == machine.name}
        assert "us-central1" in regions or machine.name == "a3-megagpu-8g"
        for region in regions:
            config = replace(
                CONFIG,
                machine_type=machine.name,
                region=region,
                zones=(f"{region}-a",),
                max_hourly_usd="none",
            )
            cost = price_of_cluster(config)
            assert cost.hourly_usd is not None, (machine.name, region, cost.unknown)
            assert bool(cost.bounds) == (machine.disk_types[0] == "hyperdisk-balanced")


def test_hyperdisk_is_counted_at_a_price_that_it_does_not_exceed() -> None:
    for row in rows("other.csv"):
        if row["what"] == "hyperdisk-extreme":
            found = disk_price("hyperdisk-balanced", gib=73, region=row["region"])
            assert found is not None and found.is_upper_bound
            assert found.usd == pytest.approx(float(row["usd"]) / 10)
    config = replace(CONFIG, machine_type="c4-standard-8")
    text = describe(config, price_of_cluster(config), speed=None)
    assert "upper bound: hyperdisk-balanced disks at hyperdisk-extreme's price" in text


@pytest.mark.parametrize(
    ("name", "region"), [("c3-highmem-8", "moon-north1"), ("c9-standard-8", "us-central1")]
)
def test_a_price_that_the_table_does_not_have_is_not_known(name: str, region: str) -> None:
    assert machine_price(name, region=region, spot=False) is None


def test_an_unknown_price_is_said() -> None:
    config = replace(CONFIG, region="moon-north1", zones=("moon-north1-a",), max_hourly_usd="none")
    cost = price_of_cluster(config)
    assert cost.hourly_usd is None and cost.most_usd(60) is None
    text = describe(config, cost, speed=None)
    for part in ("c3-highmem-8 on demand", "pd-balanced disks", "NAT and addresses"):
        assert f"{part} in moon-north1" in text


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"machine_type": "c3-standard-8", "confidential": True}, "confidential computing"),
        ({"machine_type": "c3-standard-44", "tier1": True}, "Tier_1 bandwidth"),
    ],
)
def test_a_cap_that_cannot_be_kept_for_want_of_a_price_is_refused_with_the_missing_part(
    settings: dict[str, Any], part: str
) -> None:
    with pytest.raises(
        BudgetError, match=rf"because the price of {part} is unknown.*maxHourlyUsd none"
    ):
        price_of_cluster(replace(CONFIG, **settings))


def test_spot_prices_that_are_older_than_a_month_have_a_warning() -> None:
    read = datetime.fromisoformat(f"{cloud_prices.READ_ON}T12:00:00+00:00").timestamp()
    day = 86_400.0
    assert spot_warning(read + 31 * day) is None
    assert "32 days ago" in str(spot_warning(read + 32 * day))


def test_a_cluster_above_the_cap_is_refused_with_what_would_allow_it() -> None:
    config = replace(CONFIG, node_count=16, max_hourly_usd="5")
    with pytest.raises(BudgetError, match=r"= 5, but 16 x c3-highmem-8 cost \$8\.7\d.*Usd 8\.7\d"):
        price_of_cluster(config)


def test_with_auto_the_machines_that_come_after_spot_have_to_fit_too() -> None:
    config = replace(CONFIG, max_hourly_usd="1")
    assert price_of_cluster(replace(config, spot="true"))
    with pytest.raises(BudgetError, match="on demand, after spot"):
        price_of_cluster(replace(config, spot="auto"))


def test_the_preview_says_dollars_an_hour_at_most_and_per_million_tokens() -> None:
    speed = Speed(run_id="gpt2-1", tokens_per_s=1000.0)
    text = describe(CONFIG, cost_of(CONFIG), speed=speed)
    assert "$1.6380 an hour" in text
    assert "at most $19.66" in text
    assert "$0.4550 per million tokens at 1,000 tokens/s, measured in\n  run gpt2-1" in text
    assert usd_per_million_tokens(3.6, tokens_per_s=1000) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"spot": "auto"}, {"shared_storage": "filestore"}, {"machine_type": "c4-standard-8"}],
)
def test_the_lines_of_the_preview_fit_a_terminal(settings: dict[str, Any]) -> None:
    speed = Speed(run_id="quickstart-20261122-181530-beef", tokens_per_s=12_345.0)
    config = replace(CONFIG, **settings)
    lines = describe(config, cost_of(config), speed=speed).splitlines()
    own = [line for line in lines if not line.startswith("warning: ")]
    assert max(map(len, own)) <= 80 and not any(".py" in line for line in lines)
    # With spot: auto, `up` can switch to on-demand machines, so their price is always listed.
    assert any(line.startswith("on demand, ") and "$1.6380" in line for line in lines) == (
        config.spot == "auto"
    )


def run_folder(
    runs: Path,
    name: str,
    *,
    age_s: int,
    machine: str = "c3-highmem-8",
    nodes: int = 3,
    **summary: Any,
) -> None:
    """Write a run's folder as the orchestrator does."""
    folder = runs / name
    folder.mkdir(parents=True)
    text = json.dumps({"status": "finished", "tokens_per_s": 1000.0} | summary)
    (folder / "summary.json").write_text(text, encoding="utf-8")
    inventory = {"nodes": [{"machine_type": machine} for _ in range(nodes)]}
    (folder / "inventory.json").write_text(json.dumps(inventory), encoding="utf-8")
    stamp = 1_800_000_000 - age_s
    os.utime(folder / "summary.json", (stamp, stamp))


def test_the_speed_is_of_the_newest_finished_run_on_as_many_of_the_same_machines(
    tmp_path: Path,
) -> None:
    run_folder(tmp_path, "old", age_s=500, tokens_per_s=1.0)
    run_folder(tmp_path, "right", age_s=400, tokens_per_s=2.0)
    run_folder(tmp_path, "failed", age_s=10, status="failed")
    run_folder(tmp_path, "fewer", age_s=10, nodes=2)
    run_folder(tmp_path, "others", age_s=10, machine="c3-standard-8")
    run_folder(tmp_path, "unmeasured", age_s=10, tokens_per_s=None)
    run_folder(tmp_path, "damaged", age_s=10)
    (tmp_path / "damaged/inventory.json").write_text("{", encoding="utf-8")
    found = last_measured_speed(tmp_path, machine_type="c3-highmem-8", node_count=3)
    assert found == Speed(run_id="right", tokens_per_s=2.0)


@pytest.mark.parametrize("file", ["summary.json", "inventory.json"])
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"null", b"\xff", b"[" * 20_000, b'{"a":' * 20_000, b"1" * 5_000),
        *(b'{"status": "finished", "tokens_per_s": Infinity}', b'{"nodes": 7}'),
        *(b'{"status": "finished", "tokens_per_s": -1}', b'{"nodes": [7, [], null]}'),
    ],
)
def test_a_damaged_run_has_no_speed(tmp_path: Path, file: str, content: bytes) -> None:
    run_folder(tmp_path, "one", age_s=1)
    (tmp_path / "one" / file).write_bytes(content)
    assert last_measured_speed(tmp_path, machine_type="c3-highmem-8", node_count=3) is None


def test_without_a_run_there_is_no_speed(tmp_path: Path) -> None:
    assert last_measured_speed(tmp_path, machine_type="c3-highmem-8", node_count=3) is None


def test_what_is_known_of_a_cluster_with_an_unknown_price_is_said_too() -> None:
    config = replace(CONFIG, machine_type="c3-standard-44", tier1=True, max_hourly_usd="none")
    cost = price_of_cluster(config)
    plain = cost_of(replace(config, tier1=False))
    assert cost.hourly_usd is None and cost.known == plain.hourly_usd
    assert cost.unknown == ("Tier_1 bandwidth",)


@pytest.mark.parametrize("spot", ["false", "true"])
def test_the_figures_in_the_operating_page_are_these(spot: str) -> None:
    page = (ROOT / "docs/guides/google_cloud.md").read_text(encoding="utf-8")
    cost = cost_of(replace(CONFIG, spot=spot))
    hourly, most = cost.hourly_usd, cost.most_usd(12 * 3600)
    assert f"${hourly:.2f}" in page
    assert f"${most:.2f}" in page
