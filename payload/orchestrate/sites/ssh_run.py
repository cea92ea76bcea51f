"""Follows, stops and collects a run on a cluster over SSH.

Following survives broken connections, and does not lock the run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath

from rich.console import Console

from payload.core.durations import as_clock
from payload.core.errors import (
    AnswerError,
    ConfigError,
    PreflightError,
    RankLostError,
    SshUnreachableError,
    TileforgeError,
)
from payload.core.interrupts import Interrupts
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.runs.at_risk import loses_checkpoints
from payload.orchestrate.runs.mirror import Mirrored, read_mirrored, record_collected
from payload.orchestrate.runs.remote_run import (
    RemoteRun,
    UpdateResult,
    planned_run_dir,
    require_own_remote,
)
from payload.orchestrate.runs.site import CollectResult, RunPoll, SiteRun, how_to_attach
from payload.orchestrate.sites.operator_checkpoint_copies import CheckpointCopies
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.remote_calls import NODE_FOLDER, Login
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import RunPaths, StopRequest
from payload.run_record.run_identity import known_identity
from payload.run_record.run_repair import known_config
from payload.run_record.suggested_run_commands import run_command

_POLL_S = 1.0
_TICK_S = 0.1
_RECONNECT_S = 300.0
_RETRY_S = 5.0


class ClusterRun(SiteRun):
    """A run on a cluster over SSH. A broken connection is opened again."""

    has_job = False
    is_copied = True

    def __init__(self, run: RemoteRun, *, talk: Console) -> None:
        self.paths, self.nodes = run.paths, len(run.inventory.nodes)
        self.where = f"on {run.inventory.cluster}"
        self._reported: set[str] = set()
        """Messages about damaged files that were already printed."""
        self._run = run
        self._talk = talk

    def look(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> RunPoll:
        """Update the local copy of the run, with retries; finally raise SshUnreachableError."""
        update = update_with_retries(self._run, say=say, interrupted=interrupted)
        fresh = [problem for problem in update.damaged if problem not in self._reported]
        self._reported.update(fresh)
        return RunPoll(alive=update.alive, news=[f"warning: {problem}" for problem in fresh])

    def signal(self, number: signal.Signals, request: StopRequest) -> bool:
        """Signal the supervisor; retry once on an error, because a second signal is harmless."""
        try:
            return self._run.signal([number], request=request)
        except TileforgeError:
            self._run.close()
            try:
                return self._run.signal([number], request=request)
            except TileforgeError as error:
                raise SshUnreachableError(
                    f"the stop was not delivered: {error} By the last known state, "
                    f"{how_to_attach(self.paths)}."
                ) from None

    def collect_results(self, *, at_once: bool = False) -> CollectResult:
        """Fetch the newest checkpoint and the logs of every node, and remove the run's key."""
        return collect_results(self._run, talk=self._talk, at_once=at_once)

    def start_line(self) -> str | None:
        """Return None, because the start has already printed everything."""
        return None

    def detached(self) -> str | None:
        """Update the copy once so that it shows the start, and return the message for the user."""
        with suppress(TileforgeError):  # it has started, and continues without us
            self._run.refresh()
        return super().detached()

    @contextmanager
    def watched(self, node: str | None = None) -> Iterator[Callable[[], bool]]:
        """Yield a function that fetches new data over one connection.

        A run that had ended at the last contact is not polled.
        """
        mirrored = read_mirrored(self.paths)
        if mirrored is None or not mirrored.alive:
            yield lambda: False
            return
        nodes = [each for each in self._run.inventory.nodes if node in (None, each.name)]
        yield Watch(self._run, nodes, seen_unix=mirrored.seen_unix)

    @contextmanager
    def followed(self, say: Callable[[str], None]) -> Iterator[None]:
        """Copy the newest checkpoint regularly if it would be lost with the head's machine."""
        if not loses_checkpoints(self._run.inventory.source, known_config(self.paths)):
            yield
            return
        with closing(CheckpointCopies(self._run, say=say)):
            yield

    def end_text(self) -> str:
        """Return an empty text, because `collect` prints the details."""
        return ""

    def overdue(self, waited_s: float, *, force: bool, talk: Console) -> None:
        """Raise RankLostError."""
        raise RankLostError(
            f"run {self.paths.run_id} has not ended within {waited_s:.0f} s. Try again with "
            "--force."
        )

    def close(self) -> None:
        """Close the connections."""
        self._run.close()


class EndedCopy(SiteRun):
    """The read-only copy of an ended run.

    Because of damaged records, the run's cluster is unknown.
    """

    has_job = False
    is_copied = True
    nodes = 0
    where = "on a cluster"

    def __init__(self, paths: RunPaths, error: ConfigError) -> None:
        """`error` is the reason why the cluster of the run cannot be reached."""
        self.paths = paths
        self._error = error

    def look(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> RunPoll:
        """Raise ConfigError."""
        raise self._error

    def signal(self, number: signal.Signals, request: StopRequest) -> bool:
        """Raise ConfigError."""
        raise self._error

    def collect_results(self, *, at_once: bool = False) -> CollectResult:
        """Raise ConfigError."""
        raise self._error

    @contextmanager
    def watched(self, node: str | None = None) -> Iterator[Callable[[], bool]]:
        """Yield a function that returns False, because the run has ended."""
        yield lambda: False


def update_with_retries(
    run: RemoteRun,
    *others: Node,
    say: Callable[[str], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> UpdateResult:
    """Update the copy from the head and `others`, reconnecting until the deadline.

    Raises SshUnreachableError at the deadline, or when the operator interrupts the wait.
    """
    ends = None
    while True:
        try:
            return run.update(*others, enough=interrupted)
        except AnswerError:
            raise  # a repeated request would get the same answer
        except (SshUnreachableError, PreflightError) as error:
            run.close()
            if ends is None:
                ends = time.monotonic() + _RECONNECT_S
                say(f"connection lost, retrying for {_RECONNECT_S:g} s: {error}")
            message = f"{error} By the last known state, {how_to_attach(run.paths)}."
            retry = time.monotonic() + _RETRY_S
            while time.monotonic() < retry and not interrupted():
                time.sleep(_TICK_S)
            if time.monotonic() > ends or interrupted():
                raise SshUnreachableError(message) from None


def run_of_copy(
    paths: RunPaths, mirrored: Mirrored, *, env: Mapping[str, str], talk: Console
) -> SiteRun:
    """Return the run with a copy at `paths`; connections are opened when they are needed.

    Raises ConfigError for a damaged copy of a run that was alive.
    """
    try:
        return ClusterRun(remote_run(paths, mirrored, env=env), talk=talk)
    except ConfigError as error:
        if mirrored.alive:
            raise
        return EndedCopy(paths, error)


def remote_run(paths: RunPaths, mirrored: Mirrored, *, env: Mapping[str, str]) -> RemoteRun:
    """Return the run with a copy at `paths`, for access over SSH. Raises ConfigError."""
    inventory = ClusterInventory.load(paths.inventory)
    if inventory.access.shares_folder:
        raise ConfigError(
            f"{paths.inventory}: access.kind = {inventory.access.kind!r}, but this run is on a "
            "cluster that is reached over SSH. Replace this file with the cluster's inventory."
        )
    key = Path(mirrored.ssh_key)

    def connect() -> Cluster:
        # Read the inventory again: another command or an earlier retry may have changed it.
        now = ClusterInventory.load(paths.inventory)
        return Cluster(
            now,
            login=Login(user=now.ssh_user, key=key),
            env=env,
            news=partial(update_head_address, paths, env),
        )

    run_dir = planned_run_dir(paths)
    return RemoteRun(paths, inventory, run_dir=run_dir, key=key, connect=connect)


def update_head_address(paths: RunPaths, env: Mapping[str, str]) -> str:
    """Update the head's address in the copy of a run; return a message if it changed, or ''."""
    # Google's libraries take a second to import.
    from payload.orchestrate.clouds.gcp.head_address import update_head_address

    return update_head_address(paths, env)


def adopted(
    paths: RunPaths,
    inventory: ClusterInventory,
    *,
    home: PurePosixPath,
    key: Path,
    connect: Callable[[], Cluster],
    talk: Console,
) -> ClusterRun:
    """Return a run on the head; create its local copy if it does not exist.

    Raises ConfigError if the local folder is not a copy of a run on this cluster, or if the run on
    the head is a different run with the same id.
    """
    exists = paths.root.exists() or paths.root.is_symlink()
    if exists and not is_copy_of(paths, inventory):
        raise ConfigError(
            f"{paths.root} is not a copy of a run on {inventory.cluster}, and is left unchanged. "
            "Move this folder away, or choose another folder of runs with --runs-dir."
        )
    run_dir = home / NODE_FOLDER / "runs" / paths.run_id
    run = RemoteRun(paths, inventory, run_dir=run_dir, key=key, connect=connect)
    try:
        if exists:
            head = run.cluster.connect(inventory.head)
            require_own_remote(head, run_dir, known_identity(paths))
        else:
            run.adopt()
    except BaseException:
        run.close()
        raise
    return ClusterRun(run, talk=talk)


def is_copy_of(paths: RunPaths, inventory: ClusterInventory) -> bool:
    """Return whether `paths` is the copy of a run on this cluster."""
    if paths.root.is_symlink() or not paths.plan.is_file():
        return False
    try:
        was = ClusterInventory.load(paths.inventory)
    except ConfigError:
        return False
    return not was.access.shares_folder and was.cluster == inventory.cluster


class Watch:
    """Repeatedly updates the copy of a run that was alive at the last contact."""

    def __init__(self, run: RemoteRun, nodes: Sequence[Node], *, seen_unix: float) -> None:
        self._run = run
        self._nodes = nodes
        self._seen_unix = seen_unix
        self._talk = text_console(stderr=True)
        self._reported: set[str] = set()
        self._due_s: float | None = None

    def __call__(self) -> bool:
        """Update the copy; return whether the run is alive, by the last known state.

        If the head does not answer the first update, the old copy is shown. Later updates retry and
        finally raise SshUnreachableError.
        """
        if self._due_s is None:
            self._due_s = time.monotonic()
            try:
                return self._report(self._run.update(*self._nodes))
            except TileforgeError as error:
                self._run.close()
                age = as_clock(time.time() - self._seen_unix)
                self._talk.print(f"warning: state of {age} ago: {error}")
                return True
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        return self._report(update_with_retries(self._run, *self._nodes, say=self._talk.print))

    def _report(self, update: UpdateResult) -> bool:
        missed = [f"incomplete: {error}" for error in update.missed.values()]
        for problem in (*missed, *update.damaged):
            if problem not in self._reported:
                self._reported.add(problem)
                self._talk.print(f"warning: {problem}")
        if update.missed:
            self._run.close()  # otherwise a node that did not answer is not retried
        self._due_s = time.monotonic() + (_RETRY_S if update.missed else _POLL_S)
        return update.alive


def collect_results(run: RemoteRun, *, talk: Console, at_once: bool = False) -> CollectResult:
    """Fetch the logs of every node and the newest checkpoint; remove the key of an ended run.

    Without `at_once`, ranks of a killed supervisor may save first. A failure of a worker is
    reported and does not affect the results of the other nodes. Raises an error of the head.
    """
    try:
        # End processes first: during the slow copies, another command may start the run again.
        alive, failed = _end_processes(run, talk=talk, at_once=at_once)
        missed, unfit = _fetch_records(run, talk=talk)
        checkpoint = run.collect_checkpoint(say=talk.print)
        if unfit is not None:
            talk.print(f"checkpoint: {checkpoint or 'none yet'}")
            raise unfit
        if not missed and not failed:
            record_collected(run.paths, checkpoint)
    except SshUnreachableError as error:
        raise SshUnreachableError(f"{error} {_how_to_resume(run)}") from None
    except KeyboardInterrupt:
        talk.print(_how_to_resume(run))
        raise
    if failed or missed:
        talk.print(f"after you have fixed this problem, run: {run_command('collect', run.paths)}")
    left = [error for error in failed if isinstance(error, RankLostError)]
    return CollectResult(alive=alive, checkpoint=checkpoint, left=left[0] if left else None)


def _fetch_records(
    run: RemoteRun, *, talk: Console
) -> tuple[Mapping[str, TileforgeError], ConfigError | None]:
    """Fetch logs and records; return errors by node, and the error if the copy is not writable.

    The caller can still fetch a checkpoint if the copy is not writable.
    """
    try:
        update = run.update_all()
    except ConfigError as unfit:
        return {}, unfit
    for error in update.missed.values():
        talk.print(f"warning: the collected results are incomplete: {error}")
    for problem in update.damaged:
        talk.print(f"warning: {problem}")
    return update.missed, None


def _end_processes(
    run: RemoteRun, *, talk: Console, at_once: bool
) -> tuple[bool, list[TileforgeError]]:
    """End the processes of a run that has ended and remove its key.

    Returns whether the run is alive after all, and the errors.

    Ctrl-C is deferred until this function returns: otherwise the key could be left behind.
    """
    failed: list[TileforgeError] = []
    with Interrupts() as interrupts:
        end = partial(
            run.end_leftovers,
            at_once=at_once,
            say=talk.print,
            interrupted=lambda: interrupts.count > 0,
        )
        for act in (end, run.remove_key):
            # Checked before each step: a run that was started again needs its processes and key.
            if run.is_alive():
                return True, failed
            try:
                act()
            except TileforgeError as error:
                failed.append(error)
                talk.print(f"warning: {error}")
    if not failed:
        talk.print("no process of the run is left on any node, and the run's key was removed")
    if interrupts.count:
        raise KeyboardInterrupt
    return False, failed


def _how_to_resume(run: RemoteRun) -> str:
    return (
        f"The local files are kept: {run_command('collect', run.paths)} fetches only what is "
        "missing."
    )
