"""What planning needs to know of the machines that a run will be on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from payload.inventory import ClusterInventory
from payload.launch.launchers.base import Launcher, Reach
from payload.results import RunPaths
from payload.run_config import DtypeChoice


class Access(Protocol):
    """This machine (`local.LocalAccess`) or a cluster (`cluster_access.ClusterAccess`)."""

    @property
    def python(self) -> str:
        """The interpreter that the ranks run in."""

    @property
    def link_bytes_per_s(self) -> float:
        """What a gradient exchange is expected to reach."""

    def peak_flops_per_s(self, choice: DtypeChoice) -> float | None:
        """Matrix products of all nodes together, or None when they were not measured."""

    def interfaces(self, inventory: ClusterInventory) -> Mapping[str, str]:
        """The network interface between the ranks, by node."""

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        """What each rank runs."""

    def executable(self, launcher: Launcher) -> str:
        """Return the launcher's path. Raises PreflightError that says why there is none."""

    def reach(self) -> Reach:
        """Return how a launcher on the head reaches the other nodes. Raises PreflightError."""

    def python_path(self) -> str | None:
        """Where the payload package lies, or None when it is installed."""

    def tcmalloc(self) -> str:
        """The tcmalloc library. Raises PreflightError with the line that installs it."""

    def free_memory_bytes(self) -> int | None:
        """Of the node with the least, or None when it is not known."""
