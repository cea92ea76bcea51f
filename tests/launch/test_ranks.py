"""The placement of ranks."""

from __future__ import annotations

import dataclasses

import pytest

from payload.config.launch_sections import DeviceSection, LaunchSection
from payload.core.errors import ConfigError
from payload.launch.ranks import parse_ranks, place_ranks, render_ranks
from payload.machines.machine import Domain
from tests.launch.inventories import make_inventory
from tests.support.golden_files import assert_golden


def test_one_rank_per_numa_domain_takes_all_its_cores() -> None:
    inventory = make_inventory(num_nodes=2, physical_cores=8, numa_domains=2)
    placement = place_ranks(inventory.nodes, LaunchSection())
    assert [(r.rank, r.node, r.local_rank, r.numa_domain) for r in placement.ranks] == [
        (0, "node-0", 0, 0),
        (1, "node-0", 1, 1),
        (2, "node-1", 0, 0),
        (3, "node-1", 1, 1),
    ]
    assert [r.cores for r in placement.ranks[:2]] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {r.threads for r in placement.ranks} == {4}
    assert placement.notes == ()


def test_four_ranks_on_two_cores_share_them_with_a_note() -> None:
    inventory = make_inventory(physical_cores=2)
    placement = place_ranks(inventory.nodes, LaunchSection(ranks_per_node=4))
    assert [r.cores for r in placement.ranks] == [(0,), (1,), (0,), (1,)]
    assert [r.threads for r in placement.ranks] == [1, 1, 1, 1]
    assert placement.oversubscribed
    assert "4 ranks share 2 physical core(s)" in placement.notes[0]


def test_cores_that_do_not_divide_go_to_the_first_ranks() -> None:
    placement = place_ranks(make_inventory(physical_cores=7).nodes, LaunchSection(ranks_per_node=3))
    assert [r.cores for r in placement.ranks] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [r.threads for r in placement.ranks] == [3, 2, 2]
    assert "7 cores are not a multiple of 3 ranks" in placement.notes[0]


def test_fewer_ranks_than_domains_span_whole_domains() -> None:
    inventory = make_inventory(physical_cores=8, numa_domains=4)
    placement = place_ranks(inventory.nodes, LaunchSection(ranks_per_node=2))
    assert [r.cores for r in placement.ranks] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [r.numa_domain for r in placement.ranks] == [None, None]


def test_more_ranks_than_domains_never_cross_a_domain() -> None:
    inventory = make_inventory(physical_cores=8, numa_domains=2)
    placement = place_ranks(inventory.nodes, LaunchSection(ranks_per_node=4))
    assert [r.numa_domain for r in placement.ranks] == [0, 0, 1, 1]
    assert [r.cores for r in placement.ranks] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_a_machine_with_odd_core_numbers_is_used_as_it_is() -> None:
    domains = {"node-0": (Domain(id=1, cores=(3, 5)), Domain(id=3, cores=(8, 9)))}
    inventory = make_inventory(physical_cores=4, numa_domains=2)
    placement = place_ranks(inventory.nodes, LaunchSection(), domains=domains)
    assert [(r.numa_domain, r.cores) for r in placement.ranks] == [(1, (3, 5)), (3, (8, 9))]


def test_threads_can_be_fewer_than_cores() -> None:
    placement = place_ranks(make_inventory().nodes, LaunchSection(threads_per_rank=3))
    assert placement.ranks[0].threads == 3
    assert placement.ranks[0].cores == (0, 1, 2, 3)
    assert "3 threads on 4 physical cores" in placement.notes[0]


def test_too_many_threads_name_the_most_that_fit() -> None:
    with pytest.raises(ConfigError, match=r"threads_per_rank = 3, .* 2 physical core.*Use 2 or"):
        place_ranks(make_inventory().nodes, LaunchSection(ranks_per_node=2, threads_per_rank=3))


def test_more_domains_than_cores_is_a_wrong_inventory() -> None:
    with pytest.raises(ConfigError, match="numa_domains = 2 is more than physical_cores = 1"):
        place_ranks(make_inventory(physical_cores=1, numa_domains=2).nodes, LaunchSection())


def test_a_node_with_gpus_runs_a_rank_on_each_unless_ranks_compute_on_cpus() -> None:
    inventory = make_inventory(num_nodes=2, physical_cores=8, numa_domains=2)
    nodes = [dataclasses.replace(each, gpus=4) for each in inventory.nodes]
    placement = place_ranks(nodes, LaunchSection())
    assert (placement.ranks_per_node, placement.world_size) == (4, 8)
    assert [(r.local_rank, r.cores) for r in placement.ranks[4:6]] == [(0, (0, 1)), (1, (2, 3))]
    assert place_ranks(nodes, LaunchSection(), device=DeviceSection(kind="cpu")).world_size == 4
    assert place_ranks(nodes, LaunchSection(ranks_per_node=1)).world_size == 2


def test_nodes_with_different_gpus_need_a_number_from_the_user() -> None:
    first, second = make_inventory(num_nodes=2, physical_cores=4).nodes
    mixed = (dataclasses.replace(first, gpus=2), second)
    with pytest.raises(ConfigError, match=r"differ in GPUs \(node-0 2, node-1 0\).*kind = "):
        place_ranks(mixed, LaunchSection())
    assert place_ranks(mixed, LaunchSection(), device=DeviceSection(kind="cpu")).world_size == 2


def test_nodes_with_different_domains_need_a_number_from_the_user() -> None:
    inventory = make_inventory(num_nodes=2, physical_cores=4, numa_domains=2)
    odd = dataclasses.replace(inventory.nodes[1], numa_domains=1)
    mixed = dataclasses.replace(inventory, nodes=(inventory.nodes[0], odd))
    with pytest.raises(ConfigError, match=r"differ in NUMA domains \(node-0 2, node-1 1\)"):
        place_ranks(mixed.nodes, LaunchSection())
    assert place_ranks(mixed.nodes, LaunchSection(ranks_per_node=1)).world_size == 2


def test_rank_file_is_the_golden_one_and_reads_back() -> None:
    inventory = make_inventory(num_nodes=2, physical_cores=4, numa_domains=2)
    ranks = place_ranks(inventory.nodes, LaunchSection()).ranks
    text = render_ranks(ranks)
    assert_golden("ranks.2x2.json", text)
    assert parse_ranks(text, where="ranks.json") == ranks


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1, "ranks": [{"rank": 0}]}'])
def test_a_damaged_rank_file_is_reported(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^ranks\.json: .*Start the run again\.$"):
        parse_ranks(text, where="ranks.json")


def test_a_rank_file_of_another_release_is_refused() -> None:
    with pytest.raises(ConfigError, match="schema_version is 9"):
        parse_ranks('{"schema_version": 9, "ranks": []}', where="ranks.json")
