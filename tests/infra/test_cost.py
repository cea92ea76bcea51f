"""Prices: added up as listed, capped, and never guessed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.config import ClusterConfig
from infra.cost import cluster_cost, describe, price_of_cluster, usd_per_million_tokens
from infra.machines import machine_type, machine_types
from infra.measured import Speed, last_measured_speed
from infra.prices import machine_price
from payload.errors import BudgetError
from tests.infra.stacks import ROOT

CONFIG = ClusterConfig(cluster="dev", project="my-project")


def test_the_default_cluster_is_machines_disks_and_nat() -> None:
    cost = cluster_cost(CONFIG)
    machines, disks, nat = 3 * 0.52923, 3 * 100 * 0.10 / 730, 3 * 0.0014 + 0.005
    assert cost.hourly_usd == pytest.approx(machines + disks + nat, abs=1e-6)
    assert cost.most_usd(12 * 3600) == pytest.approx(12 * (machines + disks + nat), abs=1e-4)


def test_three_spot_machines_cost_a_sixth() -> None:
    spot = cluster_cost(replace(CONFIG, spot="true"))
    assert spot.nodes[0] == pytest.approx(0.08501 + 100 * 0.10 / 730, abs=1e-6)


def test_a_head_with_a_larger_disk_and_an_address_costs_more() -> None:
    plain = cluster_cost(replace(CONFIG, egress="none")).hourly_usd
    direct = replace(CONFIG, egress="none", access_mode="direct", head_disk_gb=200)
    assert plain is not None
    assert cluster_cost(direct).hourly_usd == pytest.approx(
        plain + 0.005 + 100 * 0.10 / 730, abs=2e-6
    )


@pytest.mark.parametrize("name", ["c3-highmem-8", "c3-highmem-88", "c3-standard-176"])
@pytest.mark.parametrize("spot", [False, True])
def test_a_listed_price_is_the_sum_of_its_vcpus_and_memory(name: str, spot: bool) -> None:
    machine = machine_type(name)
    listed = machine_price(machine, region="us-central1", spot=spot)
    per_vcpu, per_gib = (0.005130, 0.000687) if spot else (0.034650, 0.003938)
    assert listed and not listed.computed
    total = machine.vcpus * per_vcpu + machine.memory_gib * per_gib
    assert listed.usd == pytest.approx(total, rel=1e-4)


def test_every_c3_machine_has_a_price_on_demand_and_spot() -> None:
    for machine in machine_types():
        if machine.family == "c3":
            assert machine_price(machine, region="us-central1", spot=False)
            assert machine_price(machine, region="us-central1", spot=True)


@pytest.mark.parametrize(
    ("name", "region", "spot"),
    [
        ("h3-standard-88", "us-central1", False),
        ("n4-standard-8", "us-central1", False),
        ("c4-standard-8", "us-central1", True),
        ("c3-highmem-8", "europe-west4", False),
        ("c3-highmem-8", "europe-west4", True),
        ("c3-highmem-22", "us-south1", True),
        ("c3-highmem-8", "us-south1", False),
    ],
)
def test_a_price_that_no_source_gives_is_not_known(name: str, region: str, spot: bool) -> None:
    assert machine_price(machine_type(name), region=region, spot=spot) is None


def test_an_unknown_price_is_said() -> None:
    config = replace(CONFIG, machine_type="h3-standard-88", max_hourly_usd="none")
    cost = price_of_cluster(config)
    assert cost.hourly_usd is None and cost.most_usd(60) is None
    text = describe(config, cost, speed=None)
    assert "not known" in text and "h3-standard-88 on demand in us-central1" in text
    assert "all else is $0.0092 an hour" in text


def test_a_cap_that_cannot_be_kept_for_want_of_a_price_is_refused() -> None:
    config = replace(CONFIG, machine_type="h3-standard-88")
    with pytest.raises(BudgetError, match=r"no price is known here of h3.*maxHourlyUsd none"):
        price_of_cluster(config)


def test_a_cluster_above_the_cap_is_refused_with_what_would_allow_it() -> None:
    config = replace(CONFIG, node_count=16, max_hourly_usd="5")
    with pytest.raises(BudgetError, match=r"= 5, and 16 x c3-highmem-8 cost \$8\.7\d.*Usd 8\.7\d"):
        price_of_cluster(config)


def test_with_auto_the_machines_that_come_after_spot_have_to_fit_too() -> None:
    config = replace(CONFIG, max_hourly_usd="1")
    assert price_of_cluster(replace(config, spot="true"))
    with pytest.raises(BudgetError, match="on demand after spot"):
        price_of_cluster(replace(config, spot="auto"))


def test_the_preview_says_dollars_an_hour_at_most_and_per_million_tokens() -> None:
    speed = Speed(run_id="gpt2-1", tokens_per_s=1000.0)
    text = describe(CONFIG, cluster_cost(CONFIG), speed=speed)
    assert "$1.6380 an hour" in text
    assert "at most $19.66" in text
    assert "$0.4550 per million tokens at the 1,000 tokens/s of run gpt2-1" in text
    assert usd_per_million_tokens(3.6, tokens_per_s=1000) == pytest.approx(1.0)


def run_folder(
    runs: Path,
    name: str,
    *,
    age_s: int,
    machine: str = "c3-highmem-8",
    nodes: int = 3,
    **summary: Any,
) -> None:
    """A run as the orchestrator leaves it."""
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
    config = replace(CONFIG, machine_type="c4-highmem-48", max_hourly_usd="none")
    cost = price_of_cluster(config)
    machines = 3 * (48 * 0.034650 + 372 * 0.003938)
    assert cost.hourly_usd is None
    assert cost.known == pytest.approx(machines + 3 * 0.0014 + 0.005, abs=1e-6)
    assert cost.unknown == ("hyperdisk-balanced disks in us-central1",)


@pytest.mark.parametrize("spot", ["false", "true"])
def test_the_figures_in_the_operating_page_are_these(spot: str) -> None:
    page = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    cost = cluster_cost(replace(CONFIG, spot=spot))
    hourly, most = cost.hourly_usd, cost.most_usd(12 * 3600)
    assert f"${hourly:.2f}" in page
    assert f"${most:.2f}" in page
