"""The interface of a launcher: the program that starts the ranks of a planned run.

Each launcher is one file of `payload/launch/launchers`, with a subclass of `Launcher` and its only
instance, `LAUNCHER`. A launcher has no side effects. It returns a command line and settings for the
plan, and parses the output of the program for the supervisor and for the trial of preflight.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import ClassVar

from payload.core.package_members import file_name
from payload.launch.environment import Rendezvous
from payload.machines.inventory import Node
from payload.machines.rank_variables import RankVariables

MISSING_LIBRARY = re.compile(
    r"(?:error while loading shared libraries: )?(\S+): cannot open shared object file"
)
"""Matches the dynamic loader's error about a missing library."""

BOOTSTRAP_AGAIN = "Run the bootstrap again on this node (bootstrap/node-setup.sh)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The route from the supervisor's machine, usually the head, to the other nodes."""

    interface: str
    """The head's network interface towards the other nodes."""
    ssh: tuple[str, ...] = ()
    """Arguments of ssh, with the run's key and all host keys. Empty for a single node."""
    node_command: tuple[str, ...] = ()
    """Command prefix that runs a command on the node with the name `{node}`. Empty with ssh."""
    each_node_command: tuple[str, ...] = ()
    """Command prefix that runs a command once on every node in parallel. Empty with ssh."""
    off_head: bool = False
    """True if the supervisor runs on a machine other than the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The programs that a launcher starts, and the nodes on which they run."""

    executable: str
    """Path of the launcher's program; for a launcher that is a Python module, the interpreter."""
    python: str
    """Python interpreter of the ranks, with the same path on every node."""
    rank_arguments: tuple[str, ...]
    """Arguments of each rank's interpreter."""
    environment: Mapping[str, str]
    """Environment of every rank and of the launcher's own process."""
    world_size: int
    ranks_per_node: int
    nodes: int
    hosts: PurePath
    """Path of the hosts file on the head: one address per line, the head first."""
    folder: PurePath
    """The run's folder, with the same path on every node."""
    rendezvous: Rendezvous
    reach: Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledRank:
    """A rank that a signal killed, according to the launcher's output."""

    rank: int
    address: str
    signal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node on which the launcher's helper process ended."""

    address: str
    how: str
    """The cause, such as `exited with status 255`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The causes in a launcher's output that explain why a run ended."""

    killed: KilledRank | None = None
    lost: LostNode | None = None
    not_started: str | None = None
    """The reason why no rank could be started, with the fix; None if the output gives no reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFailure:
    """The reason why ranks of a trial did not start on a node."""

    node: str
    cause: str
    fix: str
    shows_log: bool = True
    """True if the last lines of the output add information."""


class Launcher(ABC):
    """Starts the ranks of a run."""

    variables: ClassVar[RankVariables]
    """The environment variables from which a process reads its rank."""
    program: ClassVar[str | None] = None
    """File name of the program, next to the interpreter of the ranks; None for a Python module."""
    install: ClassVar[str] = ""
    """The command that installs the program."""
    version: ClassVar[str] = ""
    """Pattern in the output of `PROGRAM --version` that identifies the right program."""
    preference: ClassVar[int | None] = None
    """Position in the order that `auto` tries, lowest first; None if `auto` skips it."""
    spans_nodes: ClassVar[bool] = True
    """True if the launcher can start ranks on several nodes."""
    needs_ssh: ClassVar[bool] = True
    """True if the launcher reaches other nodes only by SSH, so it cannot span a Slurm job."""
    scheduler: ClassVar[str | None] = None
    """The scheduler that the launcher requires, as in the inventory's `source`; None if it
    requires no scheduler."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the scheduler variables that the launcher needs; other scheduler variables are
    removed."""
    needs_heartbeats: ClassVar[bool] = True
    """True if the supervisor must monitor the other nodes by heartbeats."""
    noise: ClassVar[re.Pattern[str] | None] = None
    """Pattern of output lines that carry no information."""

    @property
    def name(self) -> str:
        """Return the name of the launcher's source file."""
        return file_name(self)

    def unfit(self, system: str, machine: str) -> str | None:
        """Return why the launcher cannot run on this system and machine type, or None."""
        return None

    @abstractmethod
    def argv(self, job: Job) -> tuple[str, ...]:
        """Return the command line that starts all ranks from the head."""

    def settings(self, reach: Reach) -> dict[str, str]:
        """Return the variables for the launcher process, in addition to the variables of the
        ranks."""
        return {}

    def rank_settings(self, *, nodes: int) -> dict[str, str]:
        """Return variables for each rank that override values set by the launcher."""
        return {}

    def report(self, text: str) -> Report:
        """Return the reasons for the end of a run that the launcher's output contains."""
        return Report()

    def trial_failures(
        self, text: str, *, nodes: Sequence[Node], hostnames: Mapping[str, str]
    ) -> Iterator[TrialFailure]:
        """Yield the reasons in the output why ranks did not start, beginning with the head.

        `hostnames` maps the hostname of each node to its name in the inventory.
        """
        yield from ()
