"""Reading a machine's shape from a folder that looks like /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from payload.machines.cgroup_limits import CgroupLimits, read_limits
from payload.machines.machine import (
    Domain,
    Machine,
    discover,
    free_memory_bytes,
    parse_cpu_list,
    read_domains,
    total_memory_bytes,
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


def write(root: Path, files: dict[str, str]) -> None:
    """Write each file, with its folders."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")


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


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, CgroupLimits()),
        ({"cpu.max": "max 100000", "memory.max": "max"}, CgroupLimits()),
        ({"cpu.max": "150000 100000"}, CgroupLimits(cpus=1.5)),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, CgroupLimits()),
        (
            {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
            CgroupLimits(cpus=2.0),
        ),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, CgroupLimits()),
        (
            {
                "memory.max": "1000",
                "memory.current": "700",
                "memory.stat": "anon 9\nactive_file 200",
            },
            CgroupLimits(memory_bytes=1000, free_memory_bytes=500),
        ),
        (
            {"memory.max": "9000", "memory.high": "10"},
            CgroupLimits(memory_bytes=10, free_memory_bytes=10),
        ),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "700",
                "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 100",
            },
            CgroupLimits(memory_bytes=1000, free_memory_bytes=400),
        ),
        (
            {"memory.max": "1000", "memory.current": "1200"},
            CgroupLimits(memory_bytes=1000, free_memory_bytes=0),
        ),
    ],
)
def test_a_container_s_limits_are_read_in_both_versions_of_cgroups(
    tmp_path: Path, files: dict[str, str], limits: CgroupLimits
) -> None:
    write(tmp_path / "fs/cgroup", files)
    assert read_limits(sys_root=tmp_path, proc_root=tmp_path) == limits


@pytest.mark.parametrize(
    ("membership", "own", "limits"),
    [
        ("0::/user.slice/run.scope", "user.slice", CgroupLimits(cpus=3.0)),
        ("0::/user.slice/run.scope", "user.slice/run.scope", CgroupLimits(cpus=3.0)),
        ("0::/user.slice/run.scope", "user.slice/other.scope", CgroupLimits()),
        # A container that shows the path outside, over the mount of the inner group.
        ("0::/docker/abc", "", CgroupLimits(cpus=3.0)),
        ("0::/../outside", "user.slice", CgroupLimits()),
    ],
)
def test_the_limits_of_outer_groups_hold_too(
    tmp_path: Path, membership: str, own: str, limits: CgroupLimits
) -> None:
    write(tmp_path / "fs/cgroup" / own, {"cpu.max": "300000 100000"})
    write(tmp_path, {"self/cgroup": f"9:name=systemd:/\n{membership}\n"})
    assert read_limits(sys_root=tmp_path, proc_root=tmp_path) == limits


@pytest.mark.parametrize("name", [b"a:b c", b"it's", b"$(x)", b"\xff\xfe", "é".encode()])
def test_a_group_can_have_any_name(tmp_path: Path, name: bytes) -> None:
    group = tmp_path / "fs/cgroup" / os.fsdecode(name)
    write(group, {"cpu.max": "100000 100000", "memory.max": "9", "memory.stat": "odd\nx y z\n"})
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_bytes(b"0::/" + name + b"\n")
    limits = read_limits(sys_root=tmp_path, proc_root=tmp_path)
    assert limits == CgroupLimits(cpus=1.0, memory_bytes=9, free_memory_bytes=9)


def test_the_lowest_limit_of_all_groups_counts(tmp_path: Path) -> None:
    write(
        tmp_path / "fs/cgroup",
        {
            "memory/slurm/memory.limit_in_bytes": "3000",
            "memory/slurm/job_7/memory.limit_in_bytes": "2000",
            "memory/slurm/memory.usage_in_bytes": "2500",
            "cpu,cpuacct/slurm/cpu.cfs_quota_us": "50000",
        },
    )
    write(tmp_path, {"self/cgroup": "4:memory:/slurm/job_7\n1:cpu,cpuacct:/slurm\n"})
    limits = read_limits(sys_root=tmp_path, proc_root=tmp_path)
    assert limits == CgroupLimits(memory_bytes=2000, free_memory_bytes=500)


def test_free_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    def free() -> int | None:
        return free_memory_bytes(sys_root=tmp_path, proc_root=tmp_path)

    assert free() is None
    write(tmp_path, {"meminfo": "MemTotal:  9 kB\nMemAvailable:   1024 kB\n"})
    assert free() == 2**20
    write(tmp_path, {"fs/cgroup/memory.max": "5000", "fs/cgroup/memory.current": "1000"})
    assert free() == 4000


def test_a_container_s_memory_is_the_machine_s_memory(tmp_path: Path) -> None:
    assert discover(sys_root=tmp_path, proc_root=tmp_path).memory_bytes == total_memory_bytes()
    write(tmp_path, {"fs/cgroup/memory.max": str(2**30)})
    assert discover(sys_root=tmp_path, proc_root=tmp_path).memory_bytes == 2**30


def test_this_machine_is_a_cluster_of_one_node() -> None:
    machine: Machine = discover()
    inventory = machine.inventory()
    assert inventory.head.physical_cores == machine.num_cores() >= 1
    assert inventory.head.numa_domains == len(machine.domains)
    assert (inventory.source, inventory.access.kind) == ("local", "local")
