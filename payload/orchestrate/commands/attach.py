"""Commands on a run that is on a cluster: attach, stop, collect; and watching it from here.

Watching goes on through broken connections, and does not hold the run.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from signal import SIGTERM

from rich.console import Console

from payload.errors import (
    AnswerError,
    ConfigError,
    ExitCode,
    PreflightError,
    RankLostError,
    SshUnreachableError,
    TileforgeError,
    UsageError,
)
from payload.inventory import ClusterInventory, Node
from payload.orchestrate.preflight.checks import operator_key
from payload.orchestrate.run.console import duration, text_console
from payload.orchestrate.run.follow import StopWait, follow, how_to_attach, say_run_end
from payload.orchestrate.run.mirror import Mirrored, read_mirrored
from payload.orchestrate.run.store import find_run
from payload.orchestrate.run.there import (
    Look,
    RemoteRun,
    bring_home,
    planned_run_dir,
)
from payload.orchestrate.sites.choose import Seen, SiteRun, load_cluster, run_at_site
from payload.orchestrate.sites.cluster import VENV
from payload.orchestrate.ssh.connection import Cluster
from payload.orchestrate.ssh.files import look, this_code
from payload.orchestrate.ssh.streams import NODE_FOLDER, Login
from payload.results import RunPaths, StopWish, point_latest_at
from payload.run_lock import FORCE_SIGNAL

_POLL_S = 1.0
_TICK_S = 0.1
_RECONNECT_S = 300.0
_RETRY_S = 5.0


class ClusterRun(SiteRun):
    """A run on a cluster over SSH, followed through broken connections."""

    def __init__(self, run: RemoteRun, *, talk: Console) -> None:
        self.paths, self.nodes = run.paths, len(run.inventory.nodes)
        self.where = f"on {run.inventory.cluster}"
        self._run = run
        self._talk = talk

    def look(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Seen:
        """Bring the copy up to date; raises SshUnreachableError when that takes too long."""
        look = patiently(self._run, say=say, interrupted=interrupted)
        return Seen(alive=look.alive, news=[f"warning: {problem}" for problem in look.damaged])

    def signal(self, number: signal.Signals, wish: StopWish) -> bool:
        """Signal the supervisor, which may be repeated; once more where a connection has broken."""
        try:
            return self._run.signal([number], wish=wish)
        except TileforgeError:
            self._run.close()
            try:
                return self._run.signal([number], wish=wish)
            except TileforgeError as error:
                raise SshUnreachableError(
                    f"the stop was not delivered: {error} As far as is known, "
                    f"{how_to_attach(self.paths)}."
                ) from None

    def bring_home(self) -> bool:
        """Bring the newest checkpoint and every node's logs, and take the run's key away."""
        try:
            return bring_home(self._run, talk=self._talk).alive
        except TileforgeError as error:
            # A head that is gone must not hide how the run ended.
            self._talk.print(f"warning: {error}")
            return False


def follow_to_the_end(run: RemoteRun, *, arguments: argparse.Namespace, talk: Console) -> int:
    """Show the run until it has ended, bring its results home, and return its exit code."""
    return follow(ClusterRun(run, talk=talk), arguments=arguments, talk=talk)


def patiently(
    run: RemoteRun,
    *others: Node,
    say: Callable[[str], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> Look:
    """Bring the copy up to date from the head and `others`, connecting anew until the deadline.

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


@contextmanager
def opened(paths: RunPaths, mirrored: Mirrored, *, env: Mapping[str, str]) -> Iterator[RemoteRun]:
    """The run whose local copy is at `paths`; connections are made when they are needed."""
    inventory = ClusterInventory.load(paths.inventory)
    if inventory.access.shares_folder:
        raise ConfigError(
            f"{paths.inventory}: access.kind = {inventory.access.kind!r}: the run is on a "
            "cluster. Put the cluster's inventory there."
        )
    key = Path(mirrored.ssh_key)

    def connect() -> Cluster:
        return Cluster(inventory, login=Login(user=inventory.ssh_user, key=key), env=env)

    run_dir = planned_run_dir(paths)
    run = RemoteRun(paths, inventory, run_dir=run_dir, key=key, connect=connect)
    try:
        yield run
    finally:
        run.close()


def attach(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Follow a run on a cluster to its end, whoever started it."""
    if arguments.inventory is None:
        elsewhere = run_at_site(find_run(arguments.runs_dir, arguments.run), env)
        if elsewhere is not None:
            return follow(elsewhere, arguments=arguments, talk=text_console(stderr=True))
        paths, mirrored = _copy_of(arguments)
        with opened(paths, mirrored, env=env) as run:
            return follow_to_the_end(run, arguments=arguments, talk=text_console(stderr=True))
    found = _find_on_cluster(arguments, env, verb="attach")
    return attach_to(
        found.paths,
        found.inventory,
        home=found.home,
        key=found.key,
        connect=found.connect,
        arguments=arguments,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnCluster:
    """A run that the head has, whoever started it, and the way to it."""

    paths: RunPaths
    """Where its copy is, or will be."""
    inventory: ClusterInventory
    home: PurePosixPath
    key: Path
    connect: Callable[[], Cluster]


def _find_on_cluster(
    arguments: argparse.Namespace, env: Mapping[str, str], *, verb: str
) -> _OnCluster:
    """Ask the head for the run that is meant. Raises UsageError where none is under way."""
    inventory = load_cluster(arguments.inventory, env=env).inventory
    if inventory.access.shares_folder:
        raise UsageError(
            f"--inventory {arguments.inventory}: that is this machine. Leave it out for a run here."
        )
    key = operator_key(inventory, given=arguments.ssh_key)

    def connect() -> Cluster:
        return Cluster(inventory, login=Login(user=inventory.ssh_user, key=key), env=env)

    with connect() as cluster:
        head = cluster.connect(inventory.head)
        answer = look(head, this_code(), venv=VENV)
    run_id = arguments.run or answer.running
    if run_id is None:
        raise UsageError(f"no run is under way on {inventory.cluster}. Name one: {verb} RUN.")
    return _OnCluster(
        paths=RunPaths(arguments.runs_dir / run_id),
        inventory=inventory,
        home=PurePosixPath(answer.home),
        key=key,
        connect=connect,
    )


def attach_to(
    paths: RunPaths,
    inventory: ClusterInventory,
    *,
    home: PurePosixPath,
    key: Path,
    connect: Callable[[], Cluster],
    arguments: argparse.Namespace,
) -> int:
    """Follow a run that the head has, with or without a copy of it here."""
    with _adopted(paths, inventory, home=home, key=key, connect=connect) as run:
        return follow_to_the_end(run, arguments=arguments, talk=text_console(stderr=True))


@contextmanager
def _adopted(
    paths: RunPaths,
    inventory: ClusterInventory,
    *,
    home: PurePosixPath,
    key: Path,
    connect: Callable[[], Cluster],
) -> Iterator[RemoteRun]:
    """Yield the run with a copy of it here. Raises ConfigError where something else lies there."""
    exists = paths.root.exists() or paths.root.is_symlink()
    if exists and not is_copy(paths, inventory):
        raise ConfigError(
            f"{paths.root} is no copy of a run on {inventory.cluster}, and stays as it is. Move it "
            "away, or name another folder with --runs-dir."
        )
    run_dir = home / NODE_FOLDER / "runs" / paths.run_id
    run = RemoteRun(paths, inventory, run_dir=run_dir, key=key, connect=connect)
    try:
        if not exists:
            run.adopt()
        yield run
    finally:
        run.close()


def is_copy(paths: RunPaths, inventory: ClusterInventory) -> bool:
    """Return whether `paths` is the copy of a run on this cluster; mirror.json can be made anew."""
    if paths.root.is_symlink() or not paths.plan.is_file():
        return False
    try:
        was = ClusterInventory.load(paths.inventory)
    except ConfigError:
        return False
    return not was.access.shares_folder and was.cluster == inventory.cluster


def collect(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Bring logs, metrics, summary and the newest checkpoint of a run home."""
    paths, mirrored = _copy_of(arguments)
    talk = text_console(stderr=True)
    with opened(paths, mirrored, env=env) as run:
        home = bring_home(run, talk=talk)
    if home.checkpoint is not None:
        with suppress(OSError):  # the link is a convenience
            point_latest_at(paths)
    talk.print(f"checkpoint: {home.checkpoint or 'none yet'}")
    talk.print(f"everything in {paths.root}" + ("; the run goes on" if home.alive else ""))
    return ExitCode.OK


def stop(
    paths: RunPaths, mirrored: Mirrored, *, arguments: argparse.Namespace, env: Mapping[str, str]
) -> int:
    """Stop a run with a checkpoint or at once, and see that no node has a process of it left."""
    with opened(paths, mirrored, env=env) as run:
        return _stop(run, arguments=arguments)


def stop_on_cluster(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Stop a run that another machine may have started; its copy is here afterwards."""
    found = _find_on_cluster(arguments, env, verb="stop")
    with _adopted(
        found.paths, found.inventory, home=found.home, key=found.key, connect=found.connect
    ) as run:
        return _stop(run, arguments=arguments)


def _stop(run: RemoteRun, *, arguments: argparse.Namespace) -> int:
    talk = text_console(stderr=True)
    number = FORCE_SIGNAL if arguments.force else SIGTERM
    wish = StopWish(grace_s=arguments.grace)
    if run.signal([number], wish=wish):
        how = "stopping at once" if arguments.force else "saving and stopping"
        talk.print(f"run {run.paths.run_id}: {how}")
        _wait_for_the_end(run, wish)
    else:
        talk.print(f"run {run.paths.run_id} is not running")
    home = bring_home(run, talk=talk, at_once=arguments.force)
    if home.alive:
        talk.print(f"it has ended and was started again; {how_to_attach(run.paths)}")
        return ExitCode.OK
    arguments.json = False
    say_run_end(ClusterRun(run, talk=talk), arguments=arguments, talk=talk)
    if home.left is not None:
        raise home.left
    return ExitCode.OK


@contextmanager
def watched(
    paths: RunPaths, *, env: Mapping[str, str], node: str | None = None
) -> Iterator[Callable[[], bool]]:
    """What brings the copy up to date and says whether the run is alive, over one connection.

    `node` is the one besides the head whose part is wanted; None is every one.
    """
    mirrored = read_mirrored(paths)
    if mirrored is None or not mirrored.alive:
        yield lambda: False
        return
    with opened(paths, mirrored, env=env) as run:
        nodes = [each for each in run.inventory.nodes if node in (None, each.name)]
        yield Watch(run, nodes, seen_unix=mirrored.seen_unix)


class Watch:
    """One look after another at a run that was alive when it was seen last."""

    def __init__(self, run: RemoteRun, nodes: Sequence[Node], *, seen_unix: float) -> None:
        self._run = run
        self._nodes = nodes
        self._seen_unix = seen_unix
        self._talk = text_console(stderr=True)
        self._said: set[str] = set()
        self._due_s: float | None = None

    def __call__(self) -> bool:
        """Bring the copy up to date; whether the run is alive, as far as is known.

        The first time a head that does not answer is no error, as there is the copy to be shown.
        After that it is waited for, and SshUnreachableError is raised in the end.
        """
        if self._due_s is None:
            self._due_s = time.monotonic()
            try:
                return self._noted(self._run.look(*self._nodes))
            except TileforgeError as error:
                self._run.close()
                age = duration(time.time() - self._seen_unix)
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
            self._run.close()  # a node that did not answer is else not tried again
        self._due_s = time.monotonic() + (_RETRY_S if look.missed else _POLL_S)
        return look.alive


def _wait_for_the_end(run: RemoteRun, wish: StopWish) -> None:
    wait = StopWait(run.paths, wish)
    while run.refresh():
        if wait.is_over():
            raise RankLostError(
                f"run {run.paths.run_id} has not ended within {wait.waited_s():.0f} s. Try again "
                "with --force."
            )
        time.sleep(_POLL_S)


def _copy_of(arguments: argparse.Namespace) -> tuple[RunPaths, Mirrored]:
    paths = find_run(arguments.runs_dir, arguments.run)
    mirrored = read_mirrored(paths)
    if mirrored is None:
        raise UsageError(
            f"run {paths.run_id} is on this machine: look with status and logs -f. For one on a "
            "cluster, name it with --inventory FILE."
        )
    return paths, mirrored
