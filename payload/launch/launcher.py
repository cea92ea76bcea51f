"""The interface of a launcher: the program that starts the ranks of a planned run.

A launcher is one file of `payload/launch/launchers` with a subclass of `Launcher` and its only
instance, `LAUNCHER`. It has no side effects. Planning gets a command line and settings from it; the
supervisor and preflight's trial use it to parse the program's output.
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
"""Errors of the dynamic loader."""

BOOTSTRAP_AGAIN = "Run the bootstrap again on this node (bootstrap/node-setup.sh)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How the head reaches the other nodes; if the supervisor is not on the head, all nodes."""

    interface: str
    """The head's network interface towards the other nodes."""
    ssh: tuple[str, ...] = ()
    """ssh's arguments: the run's key, every host key. Empty on one node, which needs no ssh."""
    node_command: tuple[str, ...] = ()
    """Prefix that runs a command on another node; `{node}` is its name. Empty with ssh."""
    each_node_command: tuple[str, ...] = ()
    """Prefix that runs a command once on every node at the same time. Empty with ssh."""
    off_head: bool = False
    """True if the supervisor runs on a machine other than the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The programs that a launcher starts, and their nodes."""

    executable: str
    """The launcher's program; the interpreter for a launcher that is a Python module."""
    python: str
    """The interpreter of the ranks, the same path on every node."""
    rank_arguments: tuple[str, ...]
    """Arguments of each rank's interpreter."""
    environment: Mapping[str, str]
    """Environment of every rank and of the launcher's own process."""
    world_size: int
    ranks_per_node: int
    nodes: int
    hosts: PurePath
    """The hosts file on the head: one address a line, the head first."""
    folder: PurePath
    """The run's folder, the same path on every node."""
    rendezvous: Rendezvous
    reach: Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledRank:
    """A rank that was ended by a signal, according to the launcher."""

    rank: int
    address: str
    signal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node on which the launcher's own process ended."""

    address: str
    how: str
    """The cause, such as `exited with status 255`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The causes of a run's end that were found in a launcher's output."""

    killed: KilledRank | None = None
    lost: LostNode | None = None
    not_started: str | None = None
    """Why no rank could be started, with the fix; None if the output does not show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFailure:
    """Why a trial's ranks did not start on a node."""

    node: str
    cause: str
    fix: str
    shows_log: bool = True
    """True if the last lines of the output add information."""


class Launcher(ABC):
    """Starts the ranks of a run."""

    variables: ClassVar[RankVariables]
    """The variables from which its processes read their rank."""
    program: ClassVar[str | None] = None
    """Its program, in the folder of the ranks' interpreter; None for a Python module."""
    install: ClassVar[str] = ""
    """The command that installs the program."""
    version: ClassVar[str] = ""
    """Pattern in the output of `PROGRAM --version` that identifies the right program."""
    preference: ClassVar[int | None] = None
    """Position in the order that `auto` tries, lowest first; None if `auto` skips it."""
    spans_nodes: ClassVar[bool] = True
    """True if it starts ranks on several nodes."""
    needs_ssh: ClassVar[bool] = True
    """True if SSH is its only way to other nodes, so that it cannot span the nodes of a job."""
    scheduler: ClassVar[str | None] = None
    """The only scheduler in whose allocation it works, as an inventory's source; None for any."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """Prefixes of variables of another launcher or scheduler that it needs."""
    needs_heartbeats: ClassVar[bool] = True
    """True if the supervisor has to monitor the other nodes by heartbeats."""
    noise: ClassVar[re.Pattern[str] | None] = None
    """Lines of its output that carry no information."""

    @property
    def name(self) -> str:
        """Return the name of its file."""
        return file_name(self)

    def unfit(self, system: str, machine: str) -> str | None:
        """Return why it cannot run on this system and machine type, or None."""
        return None

    @abstractmethod
    def argv(self, job: Job) -> tuple[str, ...]:
        """Return the command line that starts all ranks from the head."""

    def settings(self, reach: Reach) -> dict[str, str]:
        """Return the variables of the launcher itself, in addition to the ranks' environment."""
        return {}

    def rank_settings(self, *, nodes: int) -> dict[str, str]:
        """Return variables of each rank's program that override what the launcher set."""
        return {}

    def report(self, text: str) -> Report:
        """Parse the launcher's output for the cause of a run's end."""
        return Report()

    def trial_failures(
        self, text: str, *, nodes: Sequence[Node], hostnames: Mapping[str, str]
    ) -> Iterator[TrialFailure]:
        """Yield the ranks' start failures that the output shows, the head's node first.

        `hostnames` maps the nodes' own hostnames to their names in the inventory.
        """
        yield from ()
