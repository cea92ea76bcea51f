"""The interface of a launcher, between a planned run and the program that starts its ranks.

A launcher is one file of `payload/launch/launchers` with a class below `Launcher` and its only
object, `LAUNCHER`. It is pure: planning asks it for a command line and for settings, the supervisor
and preflight's trial ask it what its output means.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import ClassVar

from payload.core.members import file_name
from payload.launch.environment import Rendezvous
from payload.machines.inventory import Node
from payload.machines.rank_variables import RankVariables

MISSING_LIBRARY = re.compile(
    r"(?:error while loading shared libraries: )?(\S+): cannot open shared object file"
)
"""Messages of the dynamic loader."""

BOOTSTRAP_AGAIN = "Run the bootstrap again there (bootstrap/node-setup.sh)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The head's way to the other nodes; the supervisor's to all of them where it is elsewhere."""

    interface: str
    """The head's network interface towards them."""
    ssh: tuple[str, ...] = ()
    """ssh's arguments: the run's key, every host key. Empty on one node, which needs no ssh."""
    node_command: tuple[str, ...] = ()
    """Words before a command that run it on another node, `{node}` for its name; empty for ssh."""
    each_node_command: tuple[str, ...] = ()
    """Words before a command that run it once on every node at the same time; empty for ssh."""
    off_head: bool = False
    """True where the supervisor is on no node of the run, or on another one than the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The programs that a launcher starts, and their nodes."""

    executable: str
    """The launcher's program; the interpreter for a launcher that is a Python module."""
    python: str
    """The interpreter that the ranks run in, equal on every node."""
    words: tuple[str, ...]
    """Arguments of each rank's interpreter."""
    environment: Mapping[str, str]
    """Environment of every rank and of the launcher's own process."""
    world_size: int
    ranks_per_node: int
    nodes: int
    hosts: PurePath
    """The hosts file on the head: one address a line, the head first."""
    folder: PurePath
    """The run's folder, equal on every node."""
    rendezvous: Rendezvous
    reach: Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledRank:
    """A rank that the launcher reports as ended by a signal."""

    rank: int
    address: str
    signal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node on which the launcher's own process ended."""

    address: str
    how: str
    """Such as `exited with status 255`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Patterns in a launcher's output that tell how a run ended."""

    killed: KilledRank | None = None
    lost: LostNode | None = None
    not_started: str | None = None
    """Why no rank could be started, with the fix, where the launcher says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFailure:
    """Why a trial's ranks did not start on a node."""

    node: str
    cause: str
    fix: str
    shows_log: bool = True
    """True if the last lines of the output tell more."""


class Launcher(ABC):
    """Starts the ranks of a run."""

    variables: ClassVar[RankVariables]
    """The names by which its processes know which rank they are."""
    program: ClassVar[str | None] = None
    """Its program, beside the ranks' interpreter; None for a Python module."""
    install: ClassVar[str] = ""
    """The command that installs the program."""
    version: ClassVar[str] = ""
    """Pattern in the output of `PROGRAM --version` that tells the right program of that name."""
    preference: ClassVar[int | None] = None
    """Place in the order in which `auto` looks; the lowest first, None never."""
    spans_nodes: ClassVar[bool] = True
    """True if it starts ranks on several nodes."""
    needs_ssh: ClassVar[bool] = True
    """True if it reaches other nodes by SSH alone, so that it cannot start ranks there in a job."""
    scheduler: ClassVar[str | None] = None
    """The scheduler in whose allocation alone it starts ranks, by the inventory's source."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """Beginnings of variables that it needs, though they are another launcher's or scheduler's."""
    needs_heartbeats: ClassVar[bool] = True
    """True if the supervisor must watch the other nodes itself."""
    noise: ClassVar[re.Pattern[str] | None] = None
    """Lines of its output that tell nothing."""

    @property
    def name(self) -> str:
        """Return the name of its file."""
        return file_name(self)

    def unfit(self, system: str, machine: str) -> str | None:
        """Return why it cannot run on this system and kind of machine, or None."""
        return None

    @abstractmethod
    def argv(self, job: Job) -> tuple[str, ...]:
        """Return the command line that starts all ranks from the head."""

    def settings(self, reach: Reach) -> dict[str, str]:
        """Return what the launcher itself gets besides the ranks' environment."""
        return {}

    def rank_settings(self, *, nodes: int) -> dict[str, str]:
        """Return what each rank's program gets besides, in place of what the launcher set."""
        return {}

    def report(self, text: str) -> Report:
        """Return what its output says of the run's end."""
        return Report()

    def trial_failures(
        self, text: str, *, nodes: Sequence[Node], hostnames: Mapping[str, str]
    ) -> Iterator[TrialFailure]:
        """Yield what its output says of ranks that did not start, the head's node first.

        `hostnames` has the nodes' names by their own hostnames.
        """
        yield from ()
