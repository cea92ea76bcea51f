"""A real Prometheus beside a real run: every panel's query returns data, and two alerts fire."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import pytest

from payload.monitor.run_metrics import METRICS
from tests.monitoring.watched import DASHBOARDS, Watched, filled_in, load, panels
from tests.supervise.planned import wait_for

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def has_values(result: list[dict[str, Any]]) -> bool:
    values = [
        float(value)
        for series in result
        for _, value in series.get("values", [series.get("value", (0, "nan"))])
    ]
    return any(map(math.isfinite, values))


@pytest.mark.parametrize(("name", "panel"), [*panels()], ids=[name for name, _ in panels()])
def test_a_panel_shows_data(watched: Watched, name: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        query = filled_in(target["expr"], run=watched.paths.run_id)
        fetch = watched.now if target.get("instant") else watched.lately
        # A rate needs two scrapes, the count of an alert one evaluation of the rules.
        wait_for(lambda: has_values(fetch(query)), f"data of {name}: {query}")  # noqa: B023


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))
def test_the_variables_of_a_dashboard_have_values(watched: Watched, path: Any) -> None:
    for variable in load(path)["templating"]["list"]:
        query = filled_in(variable["query"]["query"], run=watched.paths.run_id)
        selector, _, label = query.removeprefix("label_values(").removesuffix(")").rpartition(", ")
        wait_for(lambda: bool(watched.now(selector)), f"series of {selector}")  # noqa: B023
        found = {each["metric"].get(label) for each in watched.now(selector)}
        assert found and None not in found


def test_prometheus_has_every_metric_with_its_labels(watched: Watched) -> None:
    absent = {"tileforge_cost_dollars"}  # this machine has no price
    for metric in METRICS:
        expression = f'{metric.name}{{run="watched"}}'
        if metric.name in absent:
            assert watched.now(expression) == []
            continue
        wait_for(lambda: bool(watched.now(expression)), metric.name)  # noqa: B023
        for series in watched.now(expression):
            assert {*metric.labels} | {"__name__", "instance", "job"} == {*series["metric"]}
    ranks = {
        each["metric"]["rank"] for each in watched.now('tileforge_rank_memory_bytes{run="watched"}')
    }
    assert ranks == {"0", "1"}


def test_steps_before_and_after_the_start_of_prometheus_form_one_series(watched: Watched) -> None:
    (first,) = watched.now('min_over_time(tileforge_step{run="watched"}[30m])')
    (last,) = watched.now('tileforge_step{run="watched"}')
    assert float(first["value"][1]) == 1 and float(last["value"][1]) > 45


def test_a_run_whose_ranks_are_stopped_fires_no_progress_and_old_checkpoint(
    watched: Watched,
) -> None:
    """The last test in the file: it stops the run that the other tests query."""
    expected = {"RunMakesNoProgress", "CheckpointIsOld"}
    assert not expected & watched.firing()
    for pid in watched.pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: expected <= watched.firing(), "both alerts")
    finally:
        for pid in watched.pids:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not expected & watched.firing(), "the end of both")
