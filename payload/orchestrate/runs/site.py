"""A place where a run lives: what each site provides."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import ClassVar

from rich.console import Console

from payload.config.run_config import RunConfig
from payload.core.errors import (
    ConfigError,
    RankLostError,
)
from payload.core.members import file_name
from payload.orchestrate.runs.mirror import mirror_file, read_mirrored
from payload.orchestrate.runs.resolved_plan import ResolvedPlacement, ResolvedPlan
from payload.orchestrate.runs.run_index import is_copy, room_for
from payload.orchestrate.runs.run_request import RunRequest
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import RunJob, RunPaths, StopRequest
from payload.run_record.run_lock import FORCE_SIGNAL, is_supervised, starting
from payload.run_record.run_repair import known_config
from payload.run_record.suggested_run_commands import run_command


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoll:
    """Result of one look at a run, whose new data is then in the run folder here."""

    alive: bool
    """True if the run goes on, or waits for its nodes."""
    news: Sequence[str] = ()
    """News for the operator, a sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectResult:
    """The outcome of bringing a run's results here."""

    alive: bool
    """True if the run goes on, or was started again: its processes stay."""
    checkpoint: Path | None = None
    """The newest one that was brought; None where there is none yet, or nothing to bring."""
    left: RankLostError | None = None
    """Processes that do not end."""


class SiteRun(ABC):
    """One run at its site, as the commands here follow, stop and collect it."""

    paths: RunPaths
    """Its folder, or the copy of it, here."""
    nodes: int
    """How many it runs on."""
    where: str
    """For messages, such as `job 12 on 2 node(s)`."""
    every_s: ClassVar[float] = 1.0
    """Time between two looks."""
    outlives_us: bool = True
    """True if it goes on when nobody follows it, so that Ctrl-C detaches first."""
    was_under_way: bool = False
    """True if `start` has found it running, so that it is followed even by `run --detach`."""
    has_job: ClassVar[bool] = True
    """True if a scheduler knows better than the run's files whether it goes on."""
    is_copied: ClassVar[bool] = False
    """True if its folder here is a copy, so that even an ended run has results to bring."""
    force_s: ClassVar[float] = math.inf
    """Time that a stop at once may take before the run is `overdue`."""

    @abstractmethod
    def look(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> RunPoll:
        """Bring what is new here; a site that must wait for a connection does until interrupted."""

    @abstractmethod
    def signal(self, number: Signals, request: StopRequest) -> bool:
        """Ask for a stop, by SIGTERM or at once by FORCE_SIGNAL; return whether the run lives."""

    @abstractmethod
    def bring_home(self, *, at_once: bool = False) -> CollectResult:
        """Collect results and end what is left of the run; with `at_once`, let no rank save."""

    def start_line(self) -> str | None:
        """Return what `run` prints once the run is started; None where the site has said it."""
        return f"run {self.paths.run_id}: {self.where}; everything in {self.paths.root}"

    def detached(self) -> str | None:
        """Return words for a command that leaves the run; None where it has ended already."""
        return f"detached; {how_to_attach(self.paths)}"

    @contextmanager
    def watched(self, node: str | None = None) -> Iterator[Callable[[], bool]]:
        """Yield a function that brings what is new here and returns whether the run goes on.

        `node` is the one besides the head whose files are wanted; None stands for all nodes.
        """
        said: set[str] = set()
        yield lambda: looks_alive(self, said)

    @contextmanager
    def followed(self, say: Callable[[str], None]) -> Iterator[None]:
        """Do, until the exit, what only a command that follows the run to its end does."""
        yield

    def ended_as(self) -> str:
        """Return words to follow `run ID is not running`."""
        return f": {self.where} has ended"

    def result_line(self) -> str | None:
        """Return a stopped run's result as one line; None for all that `run` prints at an end."""
        return None

    def end_without_record(self) -> tuple[int, str] | None:
        """Return exit code and words of a run that ended before it could leave its own, or None."""
        return None

    def abandon(self) -> str:
        """End a run that does not stop when it is asked; return what was done about it."""
        self.signal(FORCE_SIGNAL, StopRequest())
        return "it was told to end at once"

    def overdue(self, waited_s: float, *, force: bool, talk: Console) -> None:
        """End a run that has not stopped in its time, or raise RankLostError with what to do."""
        waited = f"run {self.paths.run_id} has not ended within {waited_s:.0f} s"
        raise RankLostError(f"{waited}: {self.abandon()}.")

    def close(self) -> None:
        """Let go of connections and locks; the run goes on."""
        return


def how_to_attach(paths: RunPaths) -> str:
    """Return the commands that follow and end a run which nobody follows now."""
    return (
        f"run {paths.run_id} goes on. Follow it with: {run_command('attach', paths)}; end it with: "
        f"{run_command('stop', paths)}"
    )


def looks_alive(run: SiteRun, said: set[str]) -> bool:
    """Return whether a run goes on; print each warning that is not in `said`, once."""
    seen = run.look()
    for sentence in seen.news:
        if sentence.startswith("warning: ") and sentence not in said:
            said.add(sentence)
            text_console(stderr=True).print(f"{sentence} (run {run.paths.run_id})")
    return seen.alive


UnderWay = Callable[[], SiteRun | None]


class Site(ABC):
    """A place where runs live: one file of `payload/orchestrate/sites` with a class below."""

    uses_this_environment: ClassVar[bool] = False
    """True if ranks use the packages and the model cache of this process."""

    @property
    def name(self) -> str:
        """Return the name of its file, which `--site` takes."""
        return file_name(self)

    def check(self, config: RunConfig, env: Mapping[str, str]) -> ResolvedPlacement | None:
        """Return what is decided before the start; None where the nodes are not known yet.

        Raises ConfigError or PreflightError for what would fail there later.
        """
        return None

    def hold_to_resume(
        self, paths: RunPaths, under_way: UnderWay, held: ExitStack, talk: Console
    ) -> None:
        """Keep other commands from starting the run until `held` is closed.

        Raises ConfigError where one has, and where the run lives elsewhere. `under_way` returns the
        run if a site has its record.
        """
        _refuse_to_resume(paths, under_way)
        with room_for(paths):
            held.enter_context(starting(paths))
        _refuse_to_resume(paths, under_way)  # by now another command may have started it

    @abstractmethod
    def start(self, request: RunRequest) -> SiteRun:
        """Bring what the run needs there, and start it or have it started."""


class NamedSite(Site):
    """A site that `--site` names, and no inventory is of. Its file has the object `SITE`.

    Its run has a record, job.json, with the site's name and the run's number there.
    """

    @abstractmethod
    def run_of(self, paths: RunPaths, job: RunJob, env: Mapping[str, str]) -> SiteRun:
        """Return the run that a record is of."""


def _refuse_to_resume(paths: RunPaths, under_way: UnderWay) -> None:
    """Raise ConfigError for a run that goes on, or that only a cluster has."""
    if is_copy(paths):
        if known_config(paths).storage.address() is None:
            raise ConfigError(
                f"run {paths.run_id} is on a cluster, this is its copy. Name the cluster with "
                "--inventory FILE."
            )
        refuse_where_copied_alive(paths)
    refuse_under_way(paths, under_way)


def refuse_under_way(paths: RunPaths, under_way: UnderWay) -> None:
    """Raise ConfigError for a run that goes on here or in a scheduler's job."""
    if is_supervised(paths):
        raise ConfigError(
            f"run {paths.run_id} is running. Look at it with: " + run_command("status", paths)
        )
    there = under_way()
    if there is not None and there.look().alive:
        raise ConfigError(
            f"run {paths.run_id} has not ended: {there.where}. Follow it with: "
            + run_command("attach", paths)
        )


def refuse_where_copied_alive(paths: RunPaths) -> None:
    """Raise ConfigError for a copy whose run went on when its cluster was last reached."""
    mirrored = read_mirrored(paths)
    if mirrored is not None and mirrored.alive:
        raise ConfigError(
            f"run {paths.run_id} went on on its cluster when that was last reached. Look again "
            f"with: {run_command('status', paths)}. If the cluster is gone, remove "
            f"{mirror_file(paths)}, and resume again."
        )


class InventorySite(Site):
    """A site that an inventory is of, so that a run can be planned before it is started."""

    @abstractmethod
    def plan(
        self,
        paths: RunPaths,
        config: RunConfig,
        *,
        vocab_size: int | None,
        placed: ResolvedPlacement | None = None,
    ) -> ResolvedPlan:
        """Return the plan of a run that is not started; `placed` is what `check` has returned.

        Raises ConfigError and PreflightError.
        """

    @abstractmethod
    def find_run(self, run_id: str | None, *, runs_dir: Path, verb: str) -> SiteRun:
        """Return a run that is there, whoever started it; without an id, the one under way.

        `verb` is the command, for messages. Raises UsageError.
        """
