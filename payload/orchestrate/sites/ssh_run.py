"""A run on a cluster over SSH, as the commands here follow, stop and collect it.

Watching goes on through broken connections, and does not hold the run.
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
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.follow.follow import Interrupts
from payload.orchestrate.runs.at_risk import loses_checkpoints
from payload.orchestrate.runs.mirror import Mirrored, note_collected, read_mirrored
from payload.orchestrate.runs.remote_run import Look, RemoteRun, planned_run_dir, require_own_there
from payload.orchestrate.runs.site import CollectResult, RunPoll, SiteRun, how_to_attach
from payload.orchestrate.sites.local_checkpoint_copies import CheckpointCopies
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
    """A run on a cluster over SSH, followed through broken connections."""

    has_job = False
    is_copied = True

    def __init__(self, run: RemoteRun, *, talk: Console) -> None:
        self.paths, self.nodes = run.paths, len(run.inventory.nodes)
        self.where = f"on {run.inventory.cluster}"
        self._said: set[str] = set()
        """Damage there that was reported."""
        self._run = run
        self._talk = talk

    def look(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> RunPoll:
        """Bring the copy up to date; raises SshUnreachableError when that takes too long."""
        look = patiently(self._run, say=say, interrupted=interrupted)
        fresh = [problem for problem in look.damaged if problem not in self._said]
        self._said.update(fresh)
        return RunPoll(alive=look.alive, news=[f"warning: {problem}" for problem in fresh])

    def signal(self, number: signal.Signals, request: StopRequest) -> bool:
        """Signal the supervisor, which may be repeated; once more where a connection has broken."""
        try:
            return self._run.signal([number], request=request)
        except TileforgeError:
            self._run.close()
            try:
                return self._run.signal([number], request=request)
            except TileforgeError as error:
                raise SshUnreachableError(
                    f"the stop was not delivered: {error} As far as is known, "
                    f"{how_to_attach(self.paths)}."
                ) from None

    def bring_home(self, *, at_once: bool = False) -> CollectResult:
        """Bring the newest checkpoint and every node's logs, and take the run's key away."""
        return bring_home(self._run, talk=self._talk, at_once=at_once)

    def start_line(self) -> str | None:
        """Return None: the start has printed more than is known here."""
        return None

    def detached(self) -> str | None:
        """Look once, so that the copy shows the start; return words for who leaves the run."""
        with suppress(TileforgeError):  # it has started, and goes on without us
            self._run.refresh()
        return super().detached()

    @contextmanager
    def watched(self, node: str | None = None) -> Iterator[Callable[[], bool]]:
        """Yield a function that brings what is new here, over one connection.

        What was seen to have ended is not asked again.
        """
        mirrored = read_mirrored(self.paths)
        if mirrored is None or not mirrored.alive:
            yield lambda: False
            return
        nodes = [each for each in self._run.inventory.nodes if node in (None, each.name)]
        yield Watch(self._run, nodes, seen_unix=mirrored.seen_unix)

    @contextmanager
    def followed(self, say: Callable[[str], None]) -> Iterator[None]:
        """Copy the newest checkpoint here now and then, where it would be lost with its machine."""
        if not loses_checkpoints(self._run.inventory.source, known_config(self.paths)):
            yield
            return
        with closing(CheckpointCopies(self._run, say=say)):
            yield

    def ended_as(self) -> str:
        """Return nothing: what is brought home tells more."""
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
    """The copy of a run that has ended, too damaged to find the cluster by; good to be read."""

    has_job = False
    is_copied = True
    nodes = 0
    where = "on a cluster"

    def __init__(self, paths: RunPaths, error: ConfigError) -> None:
        """`error` is why its cluster cannot be reached."""
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

    def bring_home(self, *, at_once: bool = False) -> CollectResult:
        """Raise ConfigError."""
        raise self._error

    @contextmanager
    def watched(self, node: str | None = None) -> Iterator[Callable[[], bool]]:
        """Yield a function that says that the run has ended."""
        yield lambda: False


def patiently(
    run: RemoteRun,
    *others: Node,
    say: Callable[[str], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> Look:
    """Bring the copy up to date from the head and `others`, reconnecting until the deadline.

    Raises SshUnreachableError at the deadline, or when the operator does not want to wait for it.
    """
    ends = None
    while True:
        try:
            return run.look(*others, enough=interrupted)
        except AnswerError:
            raise  # asked again, it would say the same
        except (SshUnreachableError, PreflightError) as error:
            run.close()
            if ends is None:
                ends = time.monotonic() + _RECONNECT_S
                say(f"connection lost, trying for {_RECONNECT_S:g} s: {error}")
            words = f"{error} As far as is known, {how_to_attach(run.paths)}."
            retry = time.monotonic() + _RETRY_S
            while time.monotonic() < retry and not interrupted():
                time.sleep(_TICK_S)
            if time.monotonic() > ends or interrupted():
                raise SshUnreachableError(words) from None


def run_of_copy(
    paths: RunPaths, mirrored: Mirrored, *, env: Mapping[str, str], talk: Console
) -> SiteRun:
    """Return the run whose copy is at `paths`; connections are made when they are needed.

    Raises ConfigError for a damaged copy of a run that was alive.
    """
    try:
        return ClusterRun(remote_run(paths, mirrored, env=env), talk=talk)
    except ConfigError as error:
        if mirrored.alive:
            raise
        return EndedCopy(paths, error)


def remote_run(paths: RunPaths, mirrored: Mirrored, *, env: Mapping[str, str]) -> RemoteRun:
    """Return the run over SSH whose copy is at `paths`. Raises ConfigError."""
    inventory = ClusterInventory.load(paths.inventory)
    if inventory.access.shares_folder:
        raise ConfigError(
            f"{paths.inventory}: access.kind = {inventory.access.kind!r}: the run is on a "
            "cluster. Put the cluster's inventory there."
        )
    key = Path(mirrored.ssh_key)

    def connect() -> Cluster:
        # As it is now: another command, or a failure before this one, may have changed it.
        now = ClusterInventory.load(paths.inventory)
        return Cluster(
            now,
            login=Login(user=now.ssh_user, key=key),
            env=env,
            news=partial(news_of_head, paths, env),
        )

    run_dir = planned_run_dir(paths)
    return RemoteRun(paths, inventory, run_dir=run_dir, key=key, connect=connect)


def news_of_head(paths: RunPaths, env: Mapping[str, str]) -> str:
    """Bring the copy of a run up to date with how its head is reached; return words on what is new.

    They are empty for nothing.
    """
    # Google's libraries take a second to import.
    from payload.orchestrate.clouds.gcp.head_address import follow_head

    return follow_head(paths, env)


def adopted(
    paths: RunPaths,
    inventory: ClusterInventory,
    *,
    home: PurePosixPath,
    key: Path,
    connect: Callable[[], Cluster],
    talk: Console,
) -> ClusterRun:
    """Return a run that the head has, with a copy of it here.

    Raises ConfigError where something else lies there, and where the head has another run of its
    name.
    """
    exists = paths.root.exists() or paths.root.is_symlink()
    if exists and not is_copy_of(paths, inventory):
        raise ConfigError(
            f"{paths.root} is no copy of a run on {inventory.cluster}, and stays as it is. Move it "
            "away, or name another folder with --runs-dir."
        )
    run_dir = home / NODE_FOLDER / "runs" / paths.run_id
    run = RemoteRun(paths, inventory, run_dir=run_dir, key=key, connect=connect)
    try:
        if exists:
            head = run.cluster.connect(inventory.head)
            require_own_there(head, run_dir, known_identity(paths))
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
    """Repeated looks at a run that was alive when it was seen last."""

    def __init__(self, run: RemoteRun, nodes: Sequence[Node], *, seen_unix: float) -> None:
        self._run = run
        self._nodes = nodes
        self._seen_unix = seen_unix
        self._talk = text_console(stderr=True)
        self._said: set[str] = set()
        self._due_s: float | None = None

    def __call__(self) -> bool:
        """Bring the copy up to date; return whether the run is alive, as far as is known.

        The first time a head that does not answer is no error, as there is the copy to be shown.
        After that it is waited for, and SshUnreachableError is raised in the end.
        """
        if self._due_s is None:
            self._due_s = time.monotonic()
            try:
                return self._noted(self._run.look(*self._nodes))
            except TileforgeError as error:
                self._run.close()
                age = as_clock(time.time() - self._seen_unix)
                self._talk.print(f"warning: as it was {age} ago: {error}")
                return True
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        return self._noted(patiently(self._run, *self._nodes, say=self._talk.print))

    def _noted(self, look: Look) -> bool:
        missed = [f"not all is here: {error}" for error in look.missed.values()]
        for problem in (*missed, *look.damaged):
            if problem not in self._said:
                self._said.add(problem)
                self._talk.print(f"warning: {problem}")
        if look.missed:
            self._run.close()  # a node that did not answer is otherwise not retried
        self._due_s = time.monotonic() + (_RETRY_S if look.missed else _POLL_S)
        return look.alive


def bring_home(run: RemoteRun, *, talk: Console, at_once: bool = False) -> CollectResult:
    """Bring every node's logs and the newest checkpoint; take an ended run's key away.

    Ranks whose supervisor died may save first, but not with `at_once`. A worker's failure
    is reported and hides no other worker's results. Raises the head's own error.
    """
    try:
        # First what is soon done: the rest may take long enough for someone to start the run again.
        alive, failed = _end_for_good(run, talk=talk, at_once=at_once)
        missed, unfit = _bring_records(run, talk=talk)
        checkpoint = run.collect_checkpoint(say=talk.print)
        if unfit is not None:
            talk.print(f"checkpoint: {checkpoint or 'none yet'}")
            raise unfit
        if not missed and not failed:
            note_collected(run.paths, checkpoint)
    except SshUnreachableError as error:
        raise SshUnreachableError(f"{error} {_how_to_go_on(run)}") from None
    except KeyboardInterrupt:
        talk.print(_how_to_go_on(run))
        raise
    if failed or missed:
        talk.print(f"once it is fixed: {run_command('collect', run.paths)}")
    left = [error for error in failed if isinstance(error, RankLostError)]
    return CollectResult(alive=alive, checkpoint=checkpoint, left=left[0] if left else None)


def _bring_records(
    run: RemoteRun, *, talk: Console
) -> tuple[Mapping[str, TileforgeError], ConfigError | None]:
    """Bring logs and records here; return why some node's are not, and why the copy takes none.

    A copy that cannot be written keeps no checkpoint from coming.
    """
    try:
        look = run.look_at_all()
    except ConfigError as unfit:
        return {}, unfit
    for error in look.missed.values():
        talk.print(f"warning: not all is here: {error}")
    for problem in look.damaged:
        talk.print(f"warning: {problem}")
    return look.missed, None


def _end_for_good(
    run: RemoteRun, *, talk: Console, at_once: bool
) -> tuple[bool, list[TileforgeError]]:
    """End the processes of a run that has ended and remove its key.

    Returns whether the run is alive after all, and what failed.

    Ctrl-C waits for it: whoever does not come back would leave the key behind.
    """
    failed: list[TileforgeError] = []
    with Interrupts() as interrupts:
        for act in (partial(run.end_leftovers, at_once=at_once, say=talk.print), run.remove_key):
            # Asked before each, as a run that was started again needs both.
            if run.is_alive():
                return True, failed
            try:
                act()
            except TileforgeError as error:
                failed.append(error)
                talk.print(f"warning: {error}")
    if not failed:
        talk.print("no process of it is left on any node, nor its key")
    if interrupts.count:
        raise KeyboardInterrupt
    return False, failed


def _how_to_go_on(run: RemoteRun) -> str:
    return f"What is here stays: {run_command('collect', run.paths)} again goes on from there."
