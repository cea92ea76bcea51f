"""Time limits of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from payload.config.launch_sections import LimitsSection
from payload.core.errors import ConfigError, ExitCode
from payload.launch.budget import TimeLimit, cost_usd, limit_verdict, time_limit
from payload.launch.outcome import Verdict
from payload.machines.inventory import ClusterInventory
from tests.launch.inventories import make_inventory

STOPPED = Verdict(status="stopped", exit_code=ExitCode.OK)
TWO_HOURS = TimeLimit(seconds=7200.0, key="max_hours", value=2.0)


def priced(*hourly_usd: float | None) -> ClusterInventory:
    inventory = make_inventory()
    nodes = [replace(inventory.head, name=f"n{i}") for i in range(len(hourly_usd))]
    return replace(
        inventory,
        nodes=tuple(
            replace(node, hourly_usd=price) for node, price in zip(nodes, hourly_usd, strict=True)
        ),
    )


def test_without_limits_there_is_none() -> None:
    assert time_limit(LimitsSection(), priced(None).nodes) is None


def test_the_stricter_limit_counts() -> None:
    limits = LimitsSection(max_hours=2.0, max_usd=3.0)
    by_price = time_limit(limits, priced(1.0, 2.0).nodes)
    assert by_price is not None and (by_price.seconds, by_price.key) == (3600.0, "max_usd")
    by_time = time_limit(limits, priced(0.5, 0.5).nodes)
    assert by_time is not None and (by_time.seconds, by_time.key) == (7200.0, "max_hours")


@pytest.mark.parametrize(("prices", "named"), [((1.0, None), "n1"), ((0.0, 0.0), "n0, n1")])
def test_a_missing_price_is_named(prices: tuple[float | None, ...], named: str) -> None:
    match = rf"limits\.max_usd = 3, but .* no hourly_usd for {named}\."
    with pytest.raises(ConfigError, match=match):
        time_limit(LimitsSection(max_usd=3.0), priced(*prices).nodes)


def test_a_run_is_asked_to_stop_before_its_limit() -> None:
    assert TWO_HOURS.stop_at_s(grace_s=60.0) == 7140.0
    assert replace(TWO_HOURS, seconds=30.0).stop_at_s(grace_s=60.0) == 27.0


def test_a_stop_by_the_limit_is_50_and_shows_how_to_resume() -> None:
    verdict = limit_verdict(STOPPED, TWO_HOURS, spent_s=7141.0)
    assert (verdict.status, verdict.exit_code) == ("stopped", ExitCode.BUDGET)
    assert verdict.error == (
        "limits.max_hours = 2 is reached: 1.98 h of 2.00 h are used. To continue, resume with a "
        "higher limit: --set limits.max_hours=4"
    )


def test_a_run_that_finished_all_the_same_is_finished() -> None:
    finished = Verdict(status="finished", exit_code=ExitCode.OK)
    assert limit_verdict(finished, TWO_HOURS, spent_s=7141.0) is finished


def test_cost_is_that_of_all_nodes_for_the_time() -> None:
    assert cost_usd(priced(1.0, 2.0).nodes, spent_s=1800.0) == pytest.approx(1.5)
    assert cost_usd(priced(1.0, None).nodes, spent_s=1800.0) is None
