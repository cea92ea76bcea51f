"""The environment variables by which launchers tell a process which rank it is: the one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RUN_DIR = "TILEFORGE_RUN_DIR"
"""Marks every process of a run: two run folders may have one name, but not one path."""
NODE_RANK = "TILEFORGE_NODE_RANK"
"""The node's place in the hosts file. Where it is set, a rank is found by it and its local rank:
a rendezvous that numbers the nodes itself does not keep to the rank file's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVariables:
    """One launcher's names for a rank's numbers."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    only_with: str | None = None
    """A variable without which the others are somebody else's."""

    def are_in(self, env: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process that has this environment."""
        return self.rank in env and (self.only_with is None or self.only_with in env)


# Also what Accelerate, our own wrapper around each rank, and programs without a launcher set.
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
# A batch script has SLURM_PROCID, too; only what srun started has the size of its step.
SLURM = RankVariables(
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_world_size="SLURM_STEP_TASKS_PER_NODE",
    only_with="SLURM_STEP_NUM_TASKS",
)
SLURM_NODE = "SLURM_NODEID"
"""The node's place among a step's nodes."""

BY_PRECEDENCE = (TORCHRUN, INTEL_MPI, OPEN_MPI, TORCH, SLURM)
"""Launchers nest: torchrun may be started by mpirun or srun, and either by a shell that has torch's
names as leftovers. The first that fits is the innermost."""


def identify(
    env: Mapping[str, str], rows: tuple[RankVariables, ...] = BY_PRECEDENCE
) -> RankVariables | None:
    """Return the names that hold in this environment; None for a process without a launcher."""
    return next((row for row in rows if row.are_in(env)), None)


def names() -> tuple[str, ...]:
    """Return every name of the table, once."""
    found: dict[str, None] = {}
    for row in BY_PRECEDENCE:
        own = (row.rank, row.world_size, row.local_rank, row.local_world_size)
        found |= dict.fromkeys(own)
    return tuple(found)
