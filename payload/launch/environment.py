"""Environment variables of the ranks and of their launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from payload.core.python_processes import SAFE_PATH
from payload.launch.ranks import Rank
from payload.machines.process_variables import spin_environment, tuned_malloc
from payload.machines.rank_variables import RUN_DIR, TORCH, names

Malloc = Literal["tuned", "lean", "tcmalloc", "default"]

RUN_ID = "TILEFORGE_RUN_ID"
NODE = "TILEFORGE_NODE"

# For ranks under zero3: GPT-2 on 2 ranks (Xeon with AMX, 2026-11-29) took 9.95 s a step and 2.27 GB
# with `lean`, 8.50 s and 2.80 GB with `tuned`.
_LEAN = f"glibc.malloc.mmap_threshold={2**20}:glibc.malloc.hugetlb=1"

# The wrapper script of mpirun uses a scheduler if it finds variables of the scheduler. Thus a run
# that is started in a Slurm or SGE shell would use the nodes of that job. Variables of an enclosing
# MPI or torchrun job also mislead the script. Source: bin/mpirun of impi-rt 2021.18.1.
FOREIGN_PREFIXES = (
    "SLURM_",
    "PBS_",
    "LSB_",
    "QSUB_",
    "LOADL_",
    "PE_HOSTFILE",
    "NB_PARALLEL_JOB_HOSTS",
    "I_MPI_",
    "HYDRA_",
    "PMI_",
    "PMIX_",
    "MPI_LOCAL",
    "OMPI_",
    "TORCHELASTIC_",
    "PET_",
    *names(),
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TILEFORGE_RUN_",
    "TILEFORGE_NODE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The rendezvous address of the ranks, and the network interfaces that they use."""

    address: str
    port: int
    interfaces: Mapping[str, str]
    """Network interface of each node by the node's name, for gloo."""


def common_environment(
    *,
    run_id: str,
    run_dir: str,
    rendezvous: Rendezvous,
    malloc: Malloc,
    tcmalloc: str | None,
    oversubscribed: bool,
    python_path: str | None,
) -> dict[str, str]:
    """Return the variables that the launcher sets for every rank.

    `tcmalloc` is the path of the library and is needed for malloc = "tcmalloc". `python_path` is
    the folder that contains the payload package, if the package is not installed.
    """
    variables = {
        RUN_ID: run_id,
        RUN_DIR: run_dir,
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        # Lines appear in the rank's log as soon as they are printed.
        "PYTHONUNBUFFERED": "1",
        **SAFE_PATH,
    }
    if python_path:
        variables["PYTHONPATH"] = python_path
    variables |= malloc_environment(malloc, tcmalloc=tcmalloc)
    if oversubscribed:
        # Otherwise libgomp's threads would spin after each parallel region on a shared core.
        variables["OMP_WAIT_POLICY"] = "passive"
    else:
        variables |= spin_environment()
    return variables


def malloc_environment(malloc: Malloc, *, tcmalloc: str | None = None) -> dict[str, str]:
    """Return the variables that select `malloc` for a new process."""
    if malloc == "tuned":
        return tuned_malloc()
    if malloc == "lean":
        return {"GLIBC_TUNABLES": _LEAN}
    if malloc == "tcmalloc":
        assert tcmalloc, "preflight finds the library before a plan is made"
        return {"LD_PRELOAD": tcmalloc}
    return {}


def rank_environment(
    rank: Rank, *, world_size: int, ranks_per_node: int, interfaces: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that are specific to one rank.

    They include the variables that torch reads, for programs that read only these. OMP_PROC_BIND
    stays unset. Otherwise libgomp would bind the main thread to one core, gloo's threads would
    inherit that core, and the all-reduce would wait for the computation. Instead, the process is
    bound to the set of its cores.
    """
    return {
        NODE: rank.node,
        TORCH.rank: str(rank.rank),
        TORCH.world_size: str(world_size),
        TORCH.local_rank: str(rank.local_rank),
        TORCH.local_world_size: str(ranks_per_node),
        "OMP_NUM_THREADS": str(rank.threads),
        "GLOO_SOCKET_IFNAME": interfaces[rank.node],
    }


def launcher_environment(
    base: Mapping[str, str], settings: Mapping[str, str], *, keeps: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the launcher's complete environment.

    The environment has `settings`, and all variables of `base` except those of other launchers.
    Variables with a prefix in `keeps` are kept.
    """
    kept = {
        name: value
        for name, value in base.items()
        if name.startswith(keeps) or not name.startswith(FOREIGN_PREFIXES)
    }
    return kept | dict(settings)
