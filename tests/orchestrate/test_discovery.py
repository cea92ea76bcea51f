"""Reading a machine's shape from a folder that looks like /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.machines.machine import (
    Domain,
    Machine,
    cpu_quota,
    discover,
    free_memory_bytes,
    memory_limit,
    parse_cpu_list,
    read_domains,
)


def make_sys(root: Path, *, siblings: dict[int, str], nodes: dict[int, str]) -> Path:
    """A /sys with these sibling lists of logical CPUs and these CPUs of NUMA nodes."""
    for cpu, text in siblings.items():
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "core_cpus_list").write_text(text + "\n")
    for node, text in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    return root


def test_smt_siblings_count_once_and_domains_keep_their_numbers(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    root = make_sys(tmp_path, siblings=siblings, nodes={0: "0-1,4-5", 1: "2-3,6-7"})
    assert read_domains(root, allowed=range(8)) == (
        Domain(id=0, cores=(0, 1)),
        Domain(id=1, cores=(2, 3)),
    )


def test_only_allowed_cpus_are_used_and_empty_domains_left_out(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    nodes = {0: "0-1,4-5", 1: "2-3,6-7", 2: ""}
    root = make_sys(tmp_path, siblings=siblings, nodes=nodes)
    assert read_domains(root, allowed={6, 7, 3}) == (Domain(id=1, cores=(3, 6)),)


def test_a_containers_quota_limits_the_cores(tmp_path: Path) -> None:
    root = make_sys(tmp_path, siblings={c: str(c) for c in range(8)}, nodes={0: "0-7"})
    assert read_domains(root, allowed=range(8), quota=2.5) == (Domain(id=0, cores=(0, 1)),)
    assert read_domains(root, allowed=range(8), quota=0.5) == (Domain(id=0, cores=(0,)),)


def test_a_machine_that_says_nothing_has_one_domain(tmp_path: Path) -> None:
    assert read_domains(tmp_path, allowed={0, 1}) == (Domain(id=0, cores=(0, 1)),)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]), ("5", [5]), ("\n", [])],
)
def test_cpu_lists(text: str, numbers: list[int]) -> None:
    assert parse_cpu_list(text) == numbers


@pytest.mark.parametrize(("text", "quota"), [("max 100000", None), ("150000 100000", 1.5)])
def test_cgroup_2_quota(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("text", "quota"), [("-1", None), ("200000", 2.0)])
def test_cgroup_1_quota(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(text)
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    assert cpu_quota(tmp_path) == quota


def test_the_lower_of_memory_and_limit_counts(tmp_path: Path) -> None:
    whole = memory_limit(tmp_path)
    (tmp_path / "memory.max").write_text("max")
    assert memory_limit(tmp_path) == whole
    (tmp_path / "memory.max").write_text("1073741824")
    assert memory_limit(tmp_path) == 2**30


def test_free_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert free_memory_bytes(meminfo) is None
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:   1024 kB\n")
    assert free_memory_bytes(meminfo) == 2**20


def test_this_machine_is_a_cluster_of_one_node() -> None:
    machine: Machine = discover()
    inventory = machine.inventory()
    assert inventory.head.physical_cores == machine.num_cores() >= 1
    assert inventory.head.numa_domains == len(machine.domains)
    assert (inventory.source, inventory.access.kind) == ("local", "local")
