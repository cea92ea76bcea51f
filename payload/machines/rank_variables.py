"""The environment variables in which launchers pass a process its rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RUN_DIR = "TILEFORGE_RUN_DIR"
"""Environment variable with the run folder's path, which identifies the processes of a run."""
NODE_RANK = "TILEFORGE_NODE_RANK"
"""Environment variable with the node's index in the hosts file. If the variable is set, the rank is
computed from this index and the local rank. A rendezvous may number the nodes in a different order.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVariables:
    """Names of the variables in which one launcher passes the rank and the world size."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    only_with: str | None = None
    """Variable that only this launcher sets. If this variable is missing, another program set the
    launcher's other variables."""

    def are_in(self, env: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process with this environment."""
        return self.rank in env and (self.only_with is None or self.only_with in env)


# Accelerate, our own wrapper around each rank, and programs without a launcher also set these
# variables.
TORCH = RankVariables(
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
)
TORCHRUN = RankVariables(
    rank=TORCH.rank,
    world_size=TORCH.world_size,
    local_rank=TORCH.local_rank,
    local_world_size=TORCH.local_world_size,
    only_with="TORCHELASTIC_RUN_ID",
)
INTEL_MPI = RankVariables(
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
)
OPEN_MPI = RankVariables(
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
# Batch scripts also have SLURM_PROCID, but only processes that srun started have the step's size.
SLURM = RankVariables(
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_world_size="SLURM_STEP_TASKS_PER_NODE",
    only_with="SLURM_STEP_NUM_TASKS",
)
SLURM_NODE = "SLURM_NODEID"
"""Variable with the node's index among the nodes of a Slurm step."""

BY_PRECEDENCE = (TORCHRUN, INTEL_MPI, OPEN_MPI, TORCH, SLURM)
"""Launchers from the innermost to the outermost. Launchers nest: mpirun or srun can start torchrun,
and a shell can have leftover variables of torch."""


def identify(
    env: Mapping[str, str], rows: tuple[RankVariables, ...] = BY_PRECEDENCE
) -> RankVariables | None:
    """Return the variables of the innermost launcher, or None without a launcher."""
    return next((row for row in rows if row.are_in(env)), None)


def names() -> tuple[str, ...]:
    """Return the names of all launchers' variables, without duplicates."""
    found: dict[str, None] = {}
    for row in BY_PRECEDENCE:
        own = (row.rank, row.world_size, row.local_rank, row.local_world_size)
        found |= dict.fromkeys(own)
    return tuple(found)
