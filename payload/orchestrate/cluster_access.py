"""A cluster over SSH as planning sees it: what preflight found, and what each node answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from payload.errors import PreflightError
from payload.inventory import ClusterInventory
from payload.launch.environment import cluster_mpirun_environment, local_mpirun_environment
from payload.launch.plan import rank_program
from payload.orchestrate.discovery import LOOPBACK
from payload.orchestrate.facts import NodeFacts
from payload.results import RunPaths

VENV = PurePosixPath("/opt/tileforge/venv")
"""The nodes' environment, which their bootstrap makes."""

# A guess that the plan's synchronisation time is worked out with: 10 Gbit/s.
_LINK_BYTES_PER_S = 1.25e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """Answers for the whole cluster; made once its nodes have been asked."""

    facts: Mapping[str, NodeFacts]
    """By node."""
    head: str
    """The head's name."""
    code: PurePosixPath
    """The folder with the payload package in it."""
    ssh_config: PurePosixPath
    """On the head, with the run's key."""
    tcmalloc_library: str | None
    python: str = str(VENV / "bin" / "python")
    link_bytes_per_s: float = _LINK_BYTES_PER_S

    def interfaces(self, inventory: ClusterInventory) -> Mapping[str, str]:
        """Each node's interface on the way to the head; the head's to the first worker."""
        return {node.name: self.facts[node.name].interface or LOOPBACK for node in inventory.nodes}

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        """The trainer."""
        return rank_program(python=self.python, run_dir=paths.root)

    def mpirun(self) -> str:
        """The one of the nodes' environment."""
        return str(VENV / "bin" / "mpirun")

    def mpirun_environment(self) -> dict[str, str]:
        """ssh with the run's key; for one node alone, no ssh."""
        if len(self.facts) == 1:
            return local_mpirun_environment(LOOPBACK)
        interface = self.facts[self.head].interface
        if interface is None:
            raise PreflightError(
                f"{self.head}: its network interface towards the other nodes is not known. See "
                "that `ip route get` works there (iproute2)."
            )
        return cluster_mpirun_environment(interface, ssh_config=str(self.ssh_config))

    def python_path(self) -> str | None:
        """The copy of this machine's payload, in front of what is installed."""
        return str(self.code)

    def tcmalloc(self) -> str:
        """The library, which every node must have."""
        if self.tcmalloc_library is None:
            raise PreflightError(
                "launch.malloc = 'tcmalloc', but not every node has libtcmalloc. Install it there: "
                "sudo apt-get install libtcmalloc-minimal4 (or use launch.malloc = 'tuned')."
            )
        return self.tcmalloc_library

    def free_memory_bytes(self) -> int | None:
        """The memory of the node with the least; a node has nothing else to do."""
        sizes = [facts.memory_bytes for facts in self.facts.values()]
        return min((size for size in sizes if size is not None), default=None)
