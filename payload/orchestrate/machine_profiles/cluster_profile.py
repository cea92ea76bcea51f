"""A cluster's profile for planning: programs, speeds, interfaces and memory of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from payload.config.training_sections import DtypeChoice
from payload.core.dtype import Dtype
from payload.core.errors import PreflightError
from payload.launch.launcher import Launcher, Reach
from payload.launch.launchers.registry import AUTO
from payload.launch.plan import rank_program
from payload.machines.core_speed import typical_core_flops_per_s
from payload.machines.inventory import Node
from payload.orchestrate.findings.trial import Measured
from payload.orchestrate.machine_profiles.local_profile import LOOPBACK
from payload.orchestrate.ssh.remote_calls import NodeLook
from payload.run_record.run_files import RunPaths
from payload.stack.node_paths import VENV

ASSUMED_LINK_BYTES_PER_S = 1.25e9
"""A guess, 10 Gbit/s, for networks that were not measured."""


def programs_of(launcher: Launcher) -> list[str]:
    """Return the programs that a run needs in the nodes' environment."""
    return ["python", *([launcher.program] if launcher.program else [])]


def venv_executable(launcher: Launcher) -> str:
    """Return the launcher's path on every node."""
    return str(VENV / "bin" / (launcher.program or "python"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """Answers for the whole cluster."""

    interface_of: Mapping[str, str | None]
    """By node: towards the head; the head's towards the first worker."""
    memory_bytes: int | None
    """Memory of the node with the least."""
    head: str
    """The head's name."""
    code: PurePosixPath
    """The folder with the payload package in it."""
    ssh_config: PurePosixPath
    """On the head, with the run's key."""
    tcmalloc_library: str | None
    python: str = str(VENV / "bin" / "python")
    measured: Measured | None = None
    """By the newest trial of these nodes."""
    has_bf16: bool | None = None
    """True if every node's CPU multiplies bf16 itself; None where that is not known."""
    launcher: str = AUTO

    @property
    def link_bytes_per_s(self) -> float:
        """Return the measured bandwidth, else a guess."""
        known = self.measured.link_bytes_per_s() if self.measured else None
        return known or ASSUMED_LINK_BYTES_PER_S

    def peak_flops_per_s(self, choice: DtypeChoice) -> float | None:
        """Return the measured rate."""
        return self.measured.peak_flops_per_s(choice) if self.measured else None

    def dtype(self, choice: DtypeChoice) -> Dtype:
        """Return the dtype by the nodes' measured speeds, else by their CPUs, else bf16."""
        if choice != "auto":
            return choice
        if self.measured is not None:
            return self.measured.dtype(choice)
        return "fp32" if self.has_bf16 is False else "bf16"

    def core_flops_per_s(self, dtype: Dtype) -> float:
        """Return the peak of a typical core, with bf16 emulated where a node's CPU lacks it."""
        return typical_core_flops_per_s(dtype, emulates_bf16=self.has_bf16 is False)

    def interfaces(self, nodes: Sequence[Node]) -> Mapping[str, str]:
        """Return each node's interface on the way to the head; the head's to the first worker."""
        return {node.name: self.interface_of[node.name] or LOOPBACK for node in nodes}

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        """Return the trainer."""
        return rank_program(python=self.python, run_dir=paths.root)

    def executable(self, launcher: Launcher) -> str:
        """Return the one of the nodes' environment."""
        return venv_executable(launcher)

    def reach(self) -> Reach:
        """Return ssh with the run's key; for one node alone, no ssh."""
        if len(self.interface_of) == 1:
            return Reach(interface=LOOPBACK)
        interface = self.interface_of[self.head]
        if interface is None:
            raise PreflightError(
                f"{self.head}: its network interface towards the other nodes is not known. See "
                "that `ip route get` works there (iproute2)."
            )
        return Reach(interface=interface, ssh=("-F", str(self.ssh_config)))

    def python_path(self) -> str | None:
        """Return the copy of this machine's payload, in front of what is installed."""
        return str(self.code)

    def tcmalloc(self) -> str:
        """Return the library, which every node must have."""
        if self.tcmalloc_library is None:
            raise PreflightError(
                "launch.malloc = 'tcmalloc', but not every node has libtcmalloc. Install it there: "
                "sudo apt-get install libtcmalloc-minimal4 (or use launch.malloc = 'tuned')."
            )
        return self.tcmalloc_library

    def free_memory_bytes(self) -> int | None:
        """Return the memory of the node with the least; a node has nothing else to do."""
        return self.memory_bytes


Answers = Mapping[str, NodeLook]
"""By node."""
