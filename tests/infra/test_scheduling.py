"""Google's scheduling rules, each checked over all combinations of settings."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from infra.config import ClusterConfig
from infra.gcp.scheduling import scheduling
from tests.infra.stacks import Plain
from tests.infra.test_graph import deployed

ALL = [
    ClusterConfig(
        spot=spot,
        node_count=nodes,
        compact_placement="auto" if compact else "false",
        machine_type=machine,
        confidential=confidential,
    )
    for spot, nodes, compact, (machine, confidential) in itertools.product(
        ("false", "true", "auto"),
        (1, 3),
        (False, True),
        (
            ("c3-highmem-8", False),
            ("c3-standard-8", True),
            ("h3-standard-88", False),
            ("c4-standard-8", False),
        ),
    )
]


def short(config: ClusterConfig) -> str:
    """The settings that affect the rules."""
    compact = "compact" if config.compact_placement == "auto" else "loose"
    tdx = "-tdx" if config.confidential else ""
    return f"{config.node_count}-{config.machine_type}{tdx}-{compact}-spot-{config.spot}"


SPOT = [config for config in ALL if config.spot != "false"]
STANDARD = [config for config in ALL if config.spot == "false"]


@pytest.mark.parametrize("config", SPOT, ids=short)
def test_spot_is_preemptible_never_restarted_ended_at_maintenance_and_says_what_then(
    config: ClusterConfig,
) -> None:
    wanted = scheduling(config)
    assert wanted.provisioning_model == "SPOT"
    assert wanted.preemptible is True
    assert wanted.automatic_restart is False
    assert wanted.on_host_maintenance == "TERMINATE"
    assert wanted.instance_termination_action == "DELETE"


@pytest.mark.parametrize("config", STANDARD, ids=short)
def test_on_demand_has_a_termination_action_only_with_a_limit_of_its_run_time(
    config: ClusterConfig,
) -> None:
    wanted = scheduling(config)
    assert (wanted.provisioning_model, wanted.preemptible) == ("STANDARD", False)
    assert wanted.instance_termination_action == "DELETE"
    assert wanted.max_run_duration


@pytest.mark.parametrize("config", ALL, ids=short)
def test_every_machine_is_deleted_at_its_limit_and_not_restarted(config: ClusterConfig) -> None:
    wanted = scheduling(replace(config, max_lifetime="90m"))
    assert wanted.max_run_duration.seconds == 90 * 60  # type: ignore[union-attr]  # of its types as well an Output
    assert wanted.instance_termination_action == "DELETE"
    assert wanted.automatic_restart is False


@pytest.mark.parametrize(
    "config",
    [config for config in ALL if config.is_compact()],
    ids=short,
)
def test_compact_placement_ends_at_maintenance(config: ClusterConfig) -> None:
    wanted = scheduling(config)
    assert (wanted.automatic_restart, wanted.on_host_maintenance) == (False, "TERMINATE")


@pytest.mark.parametrize(
    "config",
    [config for config in ALL if config.confidential or config.machine().family == "h3"],
    ids=short,
)
def test_what_cannot_move_ends_at_maintenance(config: ClusterConfig) -> None:
    assert scheduling(config).on_host_maintenance == "TERMINATE"


def test_one_node_on_demand_moves_at_maintenance() -> None:
    assert scheduling(ClusterConfig(node_count=1)).on_host_maintenance == "MIGRATE"


def instances(case: str) -> list[Plain]:
    return deployed(case).of_type("Instance")


def test_all_nodes_are_in_one_policy_without_a_number_of_machines() -> None:
    (policy,) = deployed("default").of_type("ResourcePolicy")
    assert policy["groupPlacementPolicy"] == {"collocation": "COLLOCATED"}
    assert len({instance["resourcePolicies"] for instance in instances("default")}) == 1


@pytest.mark.parametrize("machine", ["c4-standard-8", "n4-standard-8"])
def test_families_without_compact_placement_are_placed_freely_and_move_at_maintenance(
    machine: str,
) -> None:
    config = ClusterConfig(machine_type=machine)
    assert not config.is_compact()
    assert scheduling(config).on_host_maintenance == "MIGRATE"
    assert deployed("c4").of_type("ResourcePolicy") == []
    assert all("resourcePolicies" not in instance for instance in instances("c4"))


def test_one_node_is_close_to_nobody() -> None:
    assert "resourcePolicies" not in instances("one-node")[0]


@pytest.mark.parametrize(
    ("case", "disk"),
    [("default", "pd-balanced"), ("c4", "hyperdisk-balanced"), ("h3", "hyperdisk-balanced")],
)
def test_a_machine_boots_from_a_disk_that_it_takes(case: str, disk: str) -> None:
    for instance in instances(case):
        assert instance["bootDisk"]["initializeParams"]["type"] == disk


def test_tier_1_goes_with_gvnic() -> None:
    for instance in instances("c4"):
        assert instance["networkPerformanceConfig"] == {"totalEgressBandwidthTier": "TIER_1"}
        assert instance["networkInterfaces"][0]["nicType"] == "GVNIC"
    assert "networkPerformanceConfig" not in instances("default")[0]


def test_cores_have_one_thread_where_they_could_have_two() -> None:
    assert instances("default")[0]["advancedMachineFeatures"] == {"threadsPerCore": 1}
    assert "advancedMachineFeatures" not in instances("h3")[0]
