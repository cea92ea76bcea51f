"""Programs, speeds and network interfaces of the machines that a run is planned for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from payload.config.training_sections import DtypeChoice
from payload.core.dtype import Dtype
from payload.estimates.network import Link
from payload.launch.launcher import Launcher, Reach
from payload.machines.inventory import Node
from payload.machines.speed_cache import RankSpeed
from payload.run_record.run_files import RunPaths


class MachineProfile(Protocol):
    """This machine (`local.LocalAccess`), a cluster (`cluster.ClusterAccess`) or a Slurm job."""

    @property
    def launcher(self) -> str:
        """Return the launcher for `launch.launcher = "auto"`; `auto` if all are allowed."""

    @property
    def python(self) -> str:
        """Return the interpreter that runs the ranks."""

    @property
    def link(self) -> Link:
        """Return the expected link of the gradient all-reduce."""

    def peak_flops_per_s(self, choice: DtypeChoice, *, threads: int) -> float | None:
        """Return the matmul speed of all ranks together in FLOP/s.

        The ranks have `threads` threads in total.

        Return None if it was not measured.
        """

    def rank_speed(self, dtype: Dtype, *, threads: int) -> RankSpeed | None:
        """Return the speed of a rank with `threads` threads; None if it was not measured."""

    def speed_source(self) -> str:
        """Return the source of the speeds: a measurement, or a row of the typical speeds."""

    def dtype(self, choice: DtypeChoice) -> Dtype:
        """Return the dtype that the trainer is expected to choose."""

    def core_flops_per_s(self, dtype: Dtype) -> float:
        """Return the peak of one core, for machines that were not measured."""

    def interfaces(self, nodes: Sequence[Node]) -> Mapping[str, str]:
        """Return the network interface that the ranks use on each node."""

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        """Return the command line of each rank."""

    def executable(self, launcher: Launcher) -> str:
        """Return the launcher's path. Raises PreflightError if it cannot be used."""

    def reach(self) -> Reach:
        """Return how a launcher on the head reaches the other nodes. Raises PreflightError."""

    def python_path(self) -> str | None:
        """Return the payload package's parent folder; None if the package is installed."""

    def tcmalloc(self) -> str:
        """Return the path of tcmalloc. Raises PreflightError with the command that installs it."""

    def free_memory_bytes(self) -> int | None:
        """Return the memory of the node with the least memory; None if it is unknown."""
