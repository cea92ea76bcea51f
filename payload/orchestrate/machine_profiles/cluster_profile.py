"""A cluster's profile for planning: programs, speed, network interfaces and memory of its nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from payload.config.training_sections import DtypeChoice
from payload.core.dtype import Dtype
from payload.core.errors import PreflightError
from payload.estimates.network import Link
from payload.launch.launcher import Launcher, Reach
from payload.launch.launchers.registry import AUTO, candidates
from payload.launch.plan_record import rank_program
from payload.machines.core_speed import table_source, typical_core_flops_per_s
from payload.machines.inventory import Node
from payload.machines.speed_cache import RankSpeed
from payload.orchestrate.findings.trial import Measured
from payload.orchestrate.machine_profiles.local_profile import LOOPBACK
from payload.orchestrate.ssh.remote_calls import NodeState
from payload.run_record.run_files import RunPaths
from payload.stack.node_paths import VENV

ASSUMED_LINK_BYTES_PER_S = 1.25e9
"""Bandwidth of 10 Gbit/s, assumed for networks that were not measured."""


def programs_of(launcher: Launcher) -> list[str]:
    """Return the programs that a run needs in the nodes' virtual environment."""
    return ["python", *([launcher.program] if launcher.program else [])]


def venv_executable(launcher: Launcher) -> str:
    """Return the launcher's path on every node."""
    return str(VENV / "bin" / (launcher.program or "python"))


def require_fit(launcher: Launcher, architectures: Iterable[str]) -> None:
    """Raise PreflightError if the launcher cannot run on nodes with these architectures."""
    for architecture in sorted(architectures):
        unfit = launcher.unfit("linux", architecture)
        if unfit is not None:
            raise PreflightError(f"{unfit}.")


def fitting_launcher(setting: str, architectures: Collection[str]) -> Launcher:
    """Return the preferred launcher that can run on nodes with these architectures.

    Raises PreflightError if `setting` names a launcher that cannot. `auto` always finds one.
    """
    *preferred, last = candidates(setting)
    for launcher in preferred:
        with suppress(PreflightError):
            require_fit(launcher, architectures)
            return launcher
    require_fit(last, architectures)
    return last


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """Profile of a whole cluster."""

    interface_of: Mapping[str, str | None]
    """Network interface of each node: towards the head, or on the head towards the first worker."""
    memory_bytes: int | None
    """Memory in bytes of the node with the least memory."""
    head: str
    """Name of the head node."""
    code: PurePosixPath
    """Parent folder of the payload package."""
    ssh_config: PurePosixPath
    """Path of the head's ssh_config file, which makes ssh use the run's key."""
    tcmalloc_library: str | None
    python: str = str(VENV / "bin" / "python")
    measured: Measured | None = None
    """Measurements of the newest trial run on these nodes."""
    has_bf16: bool | None = None
    """True if every node's CPU has bf16 instructions; None if unknown."""
    architectures: frozenset[str] = frozenset()
    """Architectures of the nodes, such as x86_64; empty if unknown."""
    launcher: str = AUTO

    @property
    def link(self) -> Link:
        """Return the measured or assumed link."""
        known = self.measured.link() if self.measured else None
        return known or Link(bytes_per_s=ASSUMED_LINK_BYTES_PER_S)

    def peak_flops_per_s(self, choice: DtypeChoice, *, threads: int) -> float | None:
        """Return the FLOP/s that the trial measured for its ranks, or None.

        `threads` is ignored.
        """
        del threads
        return self.measured.peak_flops_per_s(choice) if self.measured else None

    def rank_speed(self, dtype: Dtype, *, threads: int) -> RankSpeed | None:
        """Return None, because a trial measures only matmuls and the network."""
        del dtype, threads
        return None

    def speed_source(self) -> str:
        """Return the source of the speeds: a trial, or a row of the table of typical speeds."""
        return "measured on these nodes by preflight" if self.measured else table_source(None)

    def dtype(self, choice: DtypeChoice) -> Dtype:
        """Resolve `auto` from the nodes' measured speed or from their CPUs; bf16 if unknown."""
        if choice != "auto":
            return choice
        if self.measured is not None:
            return self.measured.dtype(choice)
        return "fp32" if self.has_bf16 is False else "bf16"

    def core_flops_per_s(self, dtype: Dtype) -> float:
        """Return the peak FLOP/s of a typical core; bf16 is emulated if a node's CPU lacks it."""
        return typical_core_flops_per_s(dtype, emulates_bf16=self.has_bf16 is False)

    def interfaces(self, nodes: Sequence[Node]) -> Mapping[str, str]:
        """Return the interface of each worker to the head, and of the head to the first worker."""
        return {node.name: self.interface_of[node.name] or LOOPBACK for node in nodes}

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        """Return the command line of each rank."""
        return rank_program(python=self.python, run_dir=paths.root)

    def executable(self, launcher: Launcher) -> str:
        """Return the launcher's path in the nodes' virtual environment.

        Raises PreflightError if it cannot run on the nodes.
        """
        require_fit(launcher, self.architectures)
        return venv_executable(launcher)

    def reach(self) -> Reach:
        """Return how ranks reach nodes: ssh with the run's key, or loopback for a single node."""
        if len(self.interface_of) == 1:
            return Reach(interface=LOOPBACK)
        interface = self.interface_of[self.head]
        if interface is None:
            raise PreflightError(
                f"{self.head}: the network interface to the other nodes is unknown. Check that `ip "
                "route get` works on this node (package iproute2)."
            )
        return Reach(interface=interface, ssh=("-F", str(self.ssh_config)))

    def python_path(self) -> str | None:
        """Return the folder of the uploaded payload. It overrides an installed payload."""
        return str(self.code)

    def tcmalloc(self) -> str:
        """Return the tcmalloc library. Raises PreflightError if a node lacks it."""
        if self.tcmalloc_library is None:
            raise PreflightError(
                "launch.malloc = 'tcmalloc', but not every node has libtcmalloc. Install it: "
                "sudo apt-get install libtcmalloc-minimal4 (or use launch.malloc = 'tuned')."
            )
        return self.tcmalloc_library

    def free_memory_bytes(self) -> int | None:
        """Return the bytes of memory of the node with the least memory.

        Nodes run no other programs.
        """
        return self.memory_bytes


Answers = Mapping[str, NodeState]
"""State of each node, by name."""
