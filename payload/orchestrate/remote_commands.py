"""Commands on a run that is on a cluster: attach, stop, collect; and its copy, made up to date."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from signal import SIGTERM

from payload.errors import (
    ExitCode,
    RankLostError,
    SshUnreachableError,
    TileforgeError,
    UsageError,
)
from payload.inventory import ClusterInventory, Node
from payload.orchestrate.cluster import Cluster
from payload.orchestrate.cluster_access import VENV
from payload.orchestrate.code import look, this_code
from payload.orchestrate.inventories import load_cluster
from payload.orchestrate.live import duration
from payload.orchestrate.mirror import Mirrored, read_mirrored
from payload.orchestrate.preflight import operator_key
from payload.orchestrate.remote_follow import follow_to_the_end, say_remote_end
from payload.orchestrate.remote_run import RemoteRun, planned_run_dir
from payload.orchestrate.report import text_console
from payload.orchestrate.runs import find_run, point_latest_at
from payload.orchestrate.ssh_settings import Login
from payload.orchestrate.stop_wait import StopWait, stop_wish
from payload.results import RunPaths, StopWish
from payload.run_lock import FORCE_SIGNAL

_POLL_S = 1.0


@contextmanager
def opened(paths: RunPaths, mirrored: Mirrored, *, env: Mapping[str, str]) -> Iterator[RemoteRun]:
    """The run whose local copy is at `paths`; connections are made when they are needed."""
    inventory = ClusterInventory.load(paths.inventory)
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
    run_id = arguments.run or answer["running"]
    if run_id is None:
        raise UsageError(f"no run is under way on {inventory.cluster}. Name one: attach RUN.")
    return attach_to(
        RunPaths(arguments.runs_dir / run_id),
        inventory,
        home=PurePosixPath(answer["home"]),
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
    run_dir = home / "tileforge" / "runs" / paths.run_id
    run = RemoteRun(paths, inventory, run_dir=run_dir, key=key, connect=connect)
    try:
        if not paths.plan.exists():
            paths.root.mkdir(parents=True, exist_ok=True)
            run.adopt()
        point_latest_at(paths.root.parent, paths.run_id)
        return follow_to_the_end(run, arguments=arguments, talk=text_console(stderr=True))
    finally:
        run.close()


def collect(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Bring logs, metrics, summary and the newest checkpoint of a run home."""
    paths, mirrored = _copy_of(arguments)
    talk = text_console(stderr=True)
    with opened(paths, mirrored, env=env) as run:
        try:
            alive = run.refresh_all()
            checkpoint = run.collect_checkpoint()
        except SshUnreachableError as error:
            raise SshUnreachableError(
                f"{error} What is here stays: collect {paths.run_id} again goes on from there."
            ) from None
        if not alive:
            run.end_leftovers()
            run.remove_key()
        talk.print(f"checkpoint: {checkpoint or 'none yet'}")
        talk.print(f"everything in {paths.root}" + ("; the run goes on" if alive else ""))
    return ExitCode.OK


def stop(
    paths: RunPaths, mirrored: Mirrored, *, arguments: argparse.Namespace, env: Mapping[str, str]
) -> int:
    """Stop a run with a checkpoint or at once, and see that no node has a process of it left."""
    talk = text_console(stderr=True)
    wish = FORCE_SIGNAL if arguments.force else SIGTERM
    with opened(paths, mirrored, env=env) as run:
        asked = stop_wish(arguments.grace)
        if run.signal([wish], wish=asked):
            how = "stopping at once" if arguments.force else "saving and stopping"
            talk.print(f"run {paths.run_id}: {how}")
            _wait_for_the_end(run, asked)
        else:
            talk.print(f"run {paths.run_id} is not running")
        run.end_leftovers()
        talk.print("no process of it is left on any node")
        run.refresh_all()
        run.collect_checkpoint()
        run.remove_key()
        arguments.json = False
        say_remote_end(run, arguments=arguments, talk=talk)
    return ExitCode.OK


def bring_up_to_date(
    paths: RunPaths, *, env: Mapping[str, str], ranks_of: Callable[[Node], bool]
) -> None:
    """Refresh the copy of a run that may still be going on; else say how old the copy is."""
    mirrored = read_mirrored(paths)
    if mirrored is None or not mirrored.alive:
        return
    try:
        with opened(paths, mirrored, env=env) as run:
            run.refresh(*(node for node in run.inventory.nodes if ranks_of(node)))
    except TileforgeError as error:
        age = duration(time.time() - mirrored.seen_unix)
        text_console(stderr=True).print(f"warning: as it was {age} ago: {error}")


def _wait_for_the_end(run: RemoteRun, asked: StopWish | None) -> None:
    wait = StopWait(run.paths, asked)
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
