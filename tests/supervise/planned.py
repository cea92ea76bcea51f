"""Planned runs of the stand-in program, and the supervisor that runs them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from payload.config.run_config import parse_run_config
from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.machine_profiles.local_profile import LocalAccess, port_of
from payload.orchestrate.runs.planning import PlanTarget, resolve
from payload.orchestrate.runs.run_request import PlanRequest
from payload.run_record.run_files import (
    RankProgress,
    RunPaths,
    RunState,
    StopRequest,
    last_record,
    read_json,
    write_json,
)
from payload.supervise import attempt, shared_folders
from payload.supervise.processes import processes_of
from tests.supervise import stand_in
from tests.support.waiting import DEADLINE_S

REPO = Path(__file__).parents[2]
# As for a command, no other run takes the port before the supervisor has bound it.
_RESERVED: list[socket.socket] = []
CONFIG = "[batch]\nglobal_batch_size = 8\nmicro_batch_size = 1\n[model]\npreset = 'tiny'\n"


_WITH_TIMES = """
import os, sys
from payload.supervise import shared_folders
from payload.supervise import attempt
from payload.supervise.__main__ import main
attempt._ECHO_S = {echo_s}
shared_folders.SILENT_S = {silent_s}
sys.exit(main(sys.argv[1:], os.environ))
"""


class StandInAccess(LocalAccess):
    """This machine, with the stand-in program instead of the trainer."""

    options: Sequence[str] = ()

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        return (self.python, str(Path(stand_in.__file__)), str(paths.root), *self.options)


def plan_stand_in(
    root: Path,
    *options: str,
    ranks: int = 2,
    launcher: str = "mpirun",
    port: int | None = None,
    settings: Sequence[str] = (),
) -> RunPaths:
    """A run folder as `orchestrate run` leaves it for the supervisor."""
    access = StandInAccess(os.environ)
    access.options = options
    root.mkdir(parents=True)
    config = parse_run_config(
        CONFIG,
        overrides=[
            f"launch.ranks_per_node={ranks}",
            f"launch.launcher={launcher}",
            "limits.max_restarts=0",
            *settings,
        ],
        where="test",
    )
    holder = access.reserve_port()
    _RESERVED.append(holder)
    target = PlanTarget(
        chosen=load_cluster("local", env={}),
        profile=access,
        paths=RunPaths(root),
        work_dir=REPO,
        port=port or port_of(holder),
    )
    resolve(PlanRequest(config=config, vocab_size=50257), target).write(RunPaths(root))
    return RunPaths(root)


def supervise(
    paths: RunPaths,
    *options: str,
    env: dict[str, str] | None = None,
    echo_s: float | None = None,
    silent_s: float | None = None,
) -> subprocess.Popen[bytes]:
    """Start the real supervisor; after one rank's end it leaves the others `echo_s` seconds.

    A shared folder that is silent for `silent_s` is reported.
    """
    program = ["-m", "payload.supervise"]
    if echo_s or silent_s:
        program = [
            "-c",
            _WITH_TIMES.format(
                echo_s=echo_s or attempt._ECHO_S, silent_s=silent_s or shared_folders.SILENT_S
            ),
        ]
    command = [sys.executable, *program, "--run-dir", str(paths.root), *options]
    return subprocess.Popen(command, cwd=REPO, env={**os.environ, **(env or {})})


def ask_to_stop(
    paths: RunPaths, supervisor: subprocess.Popen[bytes], *, grace_s: float | None = None
) -> None:
    # As a command sends it.
    write_json(paths.stop_request, StopRequest(pids=(supervisor.pid,), grace_s=grace_s))
    supervisor.terminate()


def wait_for(what: Callable[[], bool], description: str, *, timeout_s: float = DEADLINE_S) -> None:
    """Return as soon as `what` holds; fail after a generous time."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {description}"
        time.sleep(0.02)


def wait_for_steps(
    paths: RunPaths,
    *,
    ranks: int = 2,
    step: int = 1,
    timeout_s: float = DEADLINE_S,
    after: Collection[int] = (),
) -> list[int]:
    """Return the process ids of all ranks once each has reached that step.

    `after` has those of an earlier attempt, whose last records still exist when this one begins.
    """

    def progress() -> list[RankProgress]:
        found = [last_record(RankProgress, paths.rank_progress(rank)) for rank in range(ranks)]
        new = [entry for entry in found if entry is not None and entry.pid not in after]
        return [entry for entry in new if entry.step >= step]

    wait_for(lambda: len(progress()) == ranks, f"every rank's step {step}", timeout_s=timeout_s)
    return [entry.pid for entry in progress()]


def wait_until_gone(paths: RunPaths) -> None:
    """Fail unless every process of the run ends."""
    wait_for(lambda: not processes_of(paths.root), "the run's processes to end")


def state_of(paths: RunPaths) -> RunState:
    """Return state.json, which must exist."""
    state = read_json(RunState, paths.state)
    assert state is not None
    return state
