"""A cluster's cost is the same in preview, doctor, rehearse and the policy."""

from __future__ import annotations

import re

import pytest

from infra.gcp.node_and_cost_limits import cost_problems
from payload.core.errors import ConfigError
from payload.orchestrate.commands.doctor import check_price
from payload.orchestrate.commands.rehearse import _price_and_lifetime
from payload.pricing.cluster_cost import cluster_cost
from payload.stack.cloud_requirements import requirements_of
from tests.infra.stacks import CASES
from tests.infra.test_graph import deployed


@pytest.mark.parametrize("name", CASES)
def test_a_stack_costs_the_same_wherever_its_cost_is_shown(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stack, need = deployed(name), requirements_of(CASES[name])
    monkeypatch.chdir(tmp_path_factory.mktemp("no-catalog"))
    hourly = stack.outputs.get("hourly_usd")
    shown = check_price(need, None)
    if hourly is None:
        assert shown.outcome == "unknown"
        with pytest.raises(ConfigError, match="no known price"):
            _price_and_lifetime(need, budget_usd=1000)
        return
    found = re.search(r"\$([0-9.]+) an hour", shown.found)
    assert found is not None and float(found[1]) == pytest.approx(hourly, abs=1e-4)
    if need.spot != "auto":
        assert _price_and_lifetime(need, budget_usd=1000)[0] == pytest.approx(hourly, abs=1e-6)
    cost = cluster_cost(need.billed(spot=need.spot != "false"))
    of_nodes = cost.known - cost.shared  # the part that the policy counts
    assert list(cost_problems(stack.resources, most_usd=of_nodes + 0.001)) == []
    (problem,) = cost_problems(stack.resources, most_usd=of_nodes - 0.001)
    assert f"${of_nodes:.2f} " in problem
