"""Environment variables of ranks and launchers."""

from __future__ import annotations

from payload.config.launch_sections import LaunchSection
from payload.launch.environment import (
    Malloc,
    Rendezvous,
    common_environment,
    launcher_environment,
    rank_environment,
)
from payload.launch.launcher import Reach
from payload.launch.launchers.registry import find
from payload.launch.ranks import place_ranks
from tests.launch.inventories import make_inventory


def _common(malloc: Malloc, *, oversubscribed: bool = False) -> dict[str, str]:
    return common_environment(
        run_id="r",
        run_dir="/runs/r",
        rendezvous=Rendezvous(address="127.0.0.1", port=20000, interfaces={"a": "lo"}),
        malloc=malloc,
        tcmalloc="libtcmalloc.so.4" if malloc == "tcmalloc" else None,
        oversubscribed=oversubscribed,
        python_path=None,
    )


def test_tuned_malloc_keeps_large_blocks_and_asks_for_huge_pages() -> None:
    tunables = _common("tuned")["GLIBC_TUNABLES"].split(":")
    assert "glibc.malloc.mmap_threshold=4294967296" in tunables
    assert "glibc.malloc.trim_threshold=4294967296" in tunables
    assert "glibc.malloc.hugetlb=1" in tunables


def test_lean_malloc_returns_large_blocks_immediately() -> None:
    tunables = _common("lean")["GLIBC_TUNABLES"].split(":")
    assert tunables == ["glibc.malloc.mmap_threshold=1048576", "glibc.malloc.hugetlb=1"]


def test_tcmalloc_is_preloaded_and_default_changes_nothing() -> None:
    assert _common("tcmalloc")["LD_PRELOAD"] == "libtcmalloc.so.4"
    assert "GLIBC_TUNABLES" not in _common("tcmalloc")
    assert not {"LD_PRELOAD", "GLIBC_TUNABLES"} & set(_common("default"))


def test_ranks_that_share_cores_do_not_spin() -> None:
    assert "OMP_WAIT_POLICY" not in _common("tuned")
    shared = _common("tuned", oversubscribed=True)
    assert shared["OMP_WAIT_POLICY"] == "passive"
    assert "GOMP_SPINCOUNT" not in shared


def test_threads_spin_briefly_so_that_a_busy_machine_does_not_wait_for_them() -> None:
    # libgomp's own choice, 300,000, made a step beside two busy loops 1.5 to 3 times as long.
    assert 1_000 <= int(_common("tuned")["GOMP_SPINCOUNT"]) <= 30_000


def test_each_rank_gets_its_threads_and_its_nodes_interface() -> None:
    inventory = make_inventory(num_nodes=2, physical_cores=4, numa_domains=2)
    ranks = place_ranks(inventory.nodes, LaunchSection()).ranks
    interfaces = {"node-0": "ens4", "node-1": "eth0"}
    variables = rank_environment(ranks[3], world_size=4, ranks_per_node=2, interfaces=interfaces)
    assert variables == {
        "TILEFORGE_NODE": "node-1",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "2",
        "GLOO_SOCKET_IFNAME": "eth0",
    }


def test_variables_of_schedulers_and_outer_launchers_are_removed() -> None:
    base = {
        "HOME": "/home/a",
        "SLURM_JOBID": "5",
        "PE_HOSTFILE": "/sge",
        "PBS_ENVIRONMENT": "1",
        "LSB_JOBID": "1",
        "I_MPI_ROOT": "/opt/intel",
        "PMI_RANK": "7",
        "RANK": "3",
        "TORCHELASTIC_RUN_ID": "x",
        "TILEFORGE_RUN_DIR": "/another",
    }
    kept = launcher_environment(base, find("mpirun").settings(Reach(interface="lo")))
    assert kept == {
        "HOME": "/home/a",
        "I_MPI_HYDRA_BOOTSTRAP": "fork",
        "I_MPI_HYDRA_IFACE": "lo",
        "I_MPI_PIN": "off",
    }
