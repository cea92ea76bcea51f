"""The interface of a site: a place where runs execute."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, ClassVar

from rich.console import Console

from payload.core.errors import (
    ConfigError,
    RankLostError,
)
from payload.core.package_members import file_name
from payload.orchestrate.runs.mirror import mirror_file, read_mirrored
from payload.orchestrate.runs.run_index import is_copy, room_for
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import RunJob, RunPaths, StopRequest
from payload.run_record.run_lock import FORCE_SIGNAL, is_supervised, start_lock
from payload.run_record.run_repair import known_config
from payload.run_record.suggested_run_commands import run_command

if TYPE_CHECKING:
    from payload.config.run_config import RunConfig
    from payload.orchestrate.runs.resolved_plan import ResolvedPlacement, ResolvedPlan
    from payload.orchestrate.runs.run_request import RunRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoll:
    """Result of polling a run; polling also fetches new data into the local run folder."""

    alive: bool
    """True if the run is active, or waits for its nodes."""
    news: Sequence[str] = ()
    """Messages for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectResult:
    """Result of collecting a run."""

    alive: bool
    """True if the run is active or was started again, so its processes were not ended."""
    checkpoint: Path | None = None
    """The newest fetched checkpoint; None if there was nothing to fetch."""
    left: RankLostError | None = None
    """Error that lists processes of the run that do not end."""


class SiteRun(ABC):
    """One run at its site, for the commands that follow, stop and collect it."""

    paths: RunPaths
    """The run's folder on this machine, or the local copy of it."""
    nodes: int
    """Number of the run's nodes."""
    where: str
    """Text for messages, such as `job 12 on 2 node(s)`."""
    every_s: ClassVar[float] = 1.0
    """Interval of polling."""
    outlives_us: bool = True
    """True if the run continues when the command that shows its output has ended. In this case, the
    first Ctrl-C only detaches the command."""
    was_running: bool = False
    """True if `start` found the run active. In this case even `run --detach` shows the run's
    output."""
    has_job: ClassVar[bool] = True
    """True if the state in the scheduler is more reliable than the run's files."""
    is_copied: ClassVar[bool] = False
    """True if the local folder is a copy, so that even an ended run may have results to fetch."""
    force_s: ClassVar[float] = math.inf
    """Time that a forced stop may take before the run is `overdue`."""

    @abstractmethod
    def look(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> RunPoll:
        """Fetch new data and poll the run. Wait for a connection until `interrupted()` is True."""

    @abstractmethod
    def signal(self, number: Signals, request: StopRequest) -> bool:
        """Request a stop (SIGTERM) or force it (FORCE_SIGNAL); return whether the run is alive."""

    @abstractmethod
    def collect_results(self, *, at_once: bool = False) -> CollectResult:
        """Collect results, then end the remaining processes.

        With `at_once`, the ranks are ended without saving a checkpoint.
        """

    def start_line(self) -> str | None:
        """Return the line that `run` prints after the start; None if the site has printed it."""
        return f"run {self.paths.run_id}: {self.where}; files: {self.paths.root}"

    def detached(self) -> str | None:
        """Return the message of a command that detaches from the run; None if the run has ended."""
        return f"detached; {how_to_attach(self.paths)}"

    @contextmanager
    def watched(self, node: str | None = None) -> Iterator[Callable[[], bool]]:
        """Yield a function that fetches new data and returns whether the run is alive.

        The files of `node` are fetched in addition to the files of the head; with None, the files
        of all nodes.
        """
        printed: set[str] = set()
        yield lambda: poll_alive(self, printed)

    @contextmanager
    def followed(self, say: Callable[[str], None]) -> Iterator[None]:
        """Run background work while a command follows the run, until the block ends."""
        yield

    def end_text(self) -> str:
        """Return the text that follows `run ID is not running`."""
        return f": {self.where} has ended"

    def result_line(self) -> str | None:
        """Return the result of a stopped run in one line, or None to print the result table."""
        return None

    def end_without_record(self) -> tuple[int, str] | None:
        """Return exit code and message of a run that ended without a record, or None."""
        return None

    def abandon(self) -> str:
        """Force the end of a run that does not stop on request; return a message about it."""
        self.signal(FORCE_SIGNAL, StopRequest())
        return "the run was ended by force"

    def overdue(self, waited_s: float, *, force: bool, talk: Console) -> None:
        """End a run that has not stopped in time, or raise RankLostError with a fix."""
        waited = f"run {self.paths.run_id} has not ended within {waited_s:.0f} s"
        raise RankLostError(f"{waited}: {self.abandon()}.")

    def close(self) -> None:
        """Close connections and release locks; the run continues."""
        return


def how_to_attach(paths: RunPaths) -> str:
    """Return the commands that follow and end a detached run."""
    return (
        f"run {paths.run_id} continues. Follow it with: {run_command('attach', paths)}; end it "
        f"with: {run_command('stop', paths)}"
    )


def poll_alive(run: SiteRun, printed: set[str]) -> bool:
    """Poll a run and return whether it is alive; print each new warning once."""
    result = run.look()
    for sentence in result.news:
        if sentence.startswith("warning: ") and sentence not in printed:
            printed.add(sentence)
            text_console(stderr=True).print(f"{sentence} (run {run.paths.run_id})")
    return result.alive


FindActiveRun = Callable[[], SiteRun | None]


class Site(ABC):
    """A place where runs execute; each subclass has its own file in `payload/orchestrate/sites`."""

    uses_this_environment: ClassVar[bool] = False
    """True if ranks use the packages and the model cache of this process."""

    @property
    def name(self) -> str:
        """Return the name of the site's source file, which is also the value of `--site`."""
        return file_name(self)

    def check(self, config: RunConfig, env: Mapping[str, str]) -> ResolvedPlacement | None:
        """Return the placement of the ranks; None if the nodes are not known before the start.

        Raises ConfigError or PreflightError for settings that would fail on the nodes.
        """
        return None

    def hold_to_resume(
        self, paths: RunPaths, find_active_run: FindActiveRun, held: ExitStack, talk: Console
    ) -> None:
        """Keep other commands from starting the run until `held` is closed.

        Raises ConfigError if another command has started the run, or if the run is at a different
        site. `find_active_run` returns the run if the run's folder has the record of a site.
        """
        _refuse_to_resume(paths, find_active_run)
        with room_for(paths):
            held.enter_context(start_lock(paths))
        _refuse_to_resume(paths, find_active_run)  # another command may have started it in between

    @abstractmethod
    def start(self, request: RunRequest) -> SiteRun:
        """Copy the run's inputs to the site, and start the run or submit it."""


class NamedSite(Site):
    """A site without an inventory, which `--site` selects.

    The site's file defines the object `SITE`.

    Each run at the site has a record, job.json, with the name of the site and the id of the job.
    """

    @abstractmethod
    def run_of(self, paths: RunPaths, job: RunJob, env: Mapping[str, str]) -> SiteRun:
        """Return the run that the record `job` describes."""


def _refuse_to_resume(paths: RunPaths, find_active_run: FindActiveRun) -> None:
    """Raise ConfigError for an active run, and for a run with checkpoints that are only on a
    cluster."""
    if is_copy(paths):
        if known_config(paths).storage.address() is None:
            raise ConfigError(
                f"run {paths.run_id} is on a cluster, and this folder is a local copy. "
                "Choose the cluster with --inventory FILE."
            )
        refuse_where_copied_alive(paths)
    refuse_active(paths, find_active_run)


def refuse_active(paths: RunPaths, find_active_run: FindActiveRun) -> None:
    """Raise ConfigError for a run that is active on this machine or in a scheduler's job."""
    if is_supervised(paths):
        raise ConfigError(
            f"run {paths.run_id} is running. See its state with: " + run_command("status", paths)
        )
    run = find_active_run()
    if run is not None and run.look().alive:
        raise ConfigError(
            f"run {paths.run_id} has not ended: {run.where}. Follow it with: "
            + run_command("attach", paths)
        )


def refuse_where_copied_alive(paths: RunPaths) -> None:
    """Raise ConfigError for the copy of a run that was active when the cluster was last reached."""
    mirrored = read_mirrored(paths)
    if mirrored is not None and mirrored.alive:
        raise ConfigError(
            f"run {paths.run_id} was running when its cluster was last reached. Check again "
            f"with: {run_command('status', paths)}. If the cluster is gone, remove "
            f"{mirror_file(paths)}, and resume again."
        )


class InventorySite(Site):
    """A site with an inventory, so that a run can be planned before it is started."""

    @abstractmethod
    def plan(
        self,
        paths: RunPaths,
        config: RunConfig,
        *,
        vocab_size: int | None,
        placed: ResolvedPlacement | None = None,
        mean_tokens: float | None = None,
    ) -> ResolvedPlan:
        """Return the plan of a run without starting it; `placed` is the result of `check`.

        For `mean_tokens`, see `PlanRequest`. Raises ConfigError and PreflightError.
        """

    @abstractmethod
    def find_run(self, run_id: str | None, *, runs_dir: Path, verb: str) -> SiteRun:
        """Return a run at the site; without an id, return the active run.

        `verb` is the command, for messages. Raises UsageError.
        """
