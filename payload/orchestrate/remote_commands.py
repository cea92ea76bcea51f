"""Commands on a run that is on a cluster: attach, stop, collect; and its copy, made up to date."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from signal import SIGTERM

from payload.errors import (
    ConfigError,
    ExitCode,
    RankLostError,
    TileforgeError,
    UsageError,
)
from payload.inventory import ClusterInventory, Node
from payload.orchestrate.cluster import Cluster
from payload.orchestrate.cluster_access import VENV
from payload.orchestrate.code import look, this_code
from payload.orchestrate.console import text_console
from payload.orchestrate.inventories import load_cluster
from payload.orchestrate.live import duration
from payload.orchestrate.mirror import Mirrored, read_mirrored
from payload.orchestrate.preflight import operator_key
from payload.orchestrate.remote_end import bring_home, say_remote_end
from payload.orchestrate.remote_follow import follow_to_the_end, how_to_attach, patiently
from payload.orchestrate.remote_run import Look, RemoteRun, planned_run_dir
from payload.orchestrate.runs import find_run
from payload.orchestrate.ssh_settings import Login
from payload.orchestrate.stop_wait import StopWait
from payload.results import RunPaths, StopWish, point_latest_at
from payload.run_lock import FORCE_SIGNAL

_POLL_S = 1.0
_RETRY_S = 5.0


@contextmanager
def opened(paths: RunPaths, mirrored: Mirrored, *, env: Mapping[str, str]) -> Iterator[RemoteRun]:
    """The run whose local copy is at `paths`; connections are made when they are needed."""
    inventory = ClusterInventory.load(paths.inventory)
    if inventory.access.kind == "local":
        raise ConfigError(
            f"{paths.inventory}: access.kind = 'local': the run is on a cluster. Put the "
            "cluster's inventory there."
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
        paths, mirrored = _copy_of(arguments)
        with opened(paths, mirrored, env=env) as run:
            return follow_to_the_end(run, arguments=arguments, talk=text_console(stderr=True))
    inventory = load_cluster(arguments.inventory, env=env).inventory
    key = operator_key(inventory, given=arguments.ssh_key)

    def connect() -> Cluster:
        return Cluster(inventory, login=Login(user=inventory.ssh_user, key=key), env=env)

    with connect() as cluster:
        head = cluster.connect(inventory.head)
        answer = look(head, this_code(), venv=VENV)
    run_id = arguments.run or answer.running
    if run_id is None:
        raise UsageError(f"no run is under way on {inventory.cluster}. Name one: attach RUN.")
    return attach_to(
        RunPaths(arguments.runs_dir / run_id),
        inventory,
        home=PurePosixPath(answer.home),
        key=key,
        connect=connect,
        arguments=arguments,
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
    exists = paths.root.exists() or paths.root.is_symlink()
    if exists and not is_copy(paths, inventory):
        raise ConfigError(
            f"{paths.root} is no copy of a run on {inventory.cluster}, and stays as it is. Move it "
            "away, or name another folder with --runs-dir."
        )
    run_dir = home / "tileforge" / "runs" / paths.run_id
    run = RemoteRun(paths, inventory, run_dir=run_dir, key=key, connect=connect)
    try:
        if not exists:
            run.adopt()
        return follow_to_the_end(run, arguments=arguments, talk=text_console(stderr=True))
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
    return was.access.kind != "local" and was.cluster == inventory.cluster


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
    talk = text_console(stderr=True)
    number = FORCE_SIGNAL if arguments.force else SIGTERM
    wish = StopWish(grace_s=arguments.grace)
    with opened(paths, mirrored, env=env) as run:
        if run.signal([number], wish=wish):
            how = "stopping at once" if arguments.force else "saving and stopping"
            talk.print(f"run {paths.run_id}: {how}")
            _wait_for_the_end(run, wish)
        else:
            talk.print(f"run {paths.run_id} is not running")
        home = bring_home(run, talk=talk, at_once=arguments.force)
        if home.alive:
            talk.print(f"it has ended and was started again; {how_to_attach(run)}")
            return ExitCode.OK
        arguments.json = False
        say_remote_end(run, arguments=arguments, talk=talk)
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
