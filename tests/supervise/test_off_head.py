"""A supervisor on no node of its run, as on a login node: every rank is on another machine.

The head's heartbeat program is a local process, and the supervisor's messages to it are recorded.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.launch.plan_record import LaunchPlan
from payload.machines.inventory import ClusterInventory
from payload.machines.machine import hostname
from payload.run_record.run_files import RunPaths, Summary, read_json
from payload.supervise.processes import processes_of
from tests.supervise.planned import (
    ask_to_stop,
    plan_stand_in,
    state_of,
    supervise,
    wait_for,
    wait_for_steps,
)
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.ranks
ENDLESS = ("--steps", "100000")


@pytest.fixture
def port() -> Iterator[int]:
    """A port of the head that takes connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


def plan_off_head(root: Path, *options: str, port: int) -> RunPaths:
    """Return a planned run whose supervisor considers another machine the head."""
    paths = plan_stand_in(root, *ENDLESS, *options)
    through = f'tee -a {shlex.quote(str(root / "told"))} | "$@"'
    plan = LaunchPlan.load(paths.plan)
    plan = replace(plan, off_head=True, node_command=("sh", "-c", through, "sh"))
    paths.plan.write_text(plan.to_json(), encoding="utf-8")
    inventory = ClusterInventory.load(paths.inventory)
    head = replace(inventory.head, address="127.0.0.1", ssh_port=port)
    paths.inventory.write_text(replace(inventory, nodes=(head,)).to_json(), encoding="utf-8")
    return paths


def told(paths: RunPaths) -> set[str]:
    """Return the messages of the supervisor to the head."""
    file = paths.root / "told"
    return set(file.read_text(encoding="ascii").split()) if file.exists() else set()


@pytest.mark.slow
def test_a_stop_reaches_rank_0_through_its_node_it_saves_and_a_later_run_is_not_stopped(
    tmp_path: Path, port: int
) -> None:
    paths = plan_off_head(tmp_path / "run", "--save-s", "1", port=port)
    supervisor = supervise(paths)
    before = wait_for_steps(paths)
    pid = before[0]
    assert state_of(paths).node == hostname()
    ask_to_stop(paths, supervisor)
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK
    assert (state_of(paths).status, state_of(paths).error) == ("stopped", None)
    summary = read_json(Summary, paths.summary)
    assert summary is not None and summary.status == "stopped"
    assert paths.rank_log(0).read_text().splitlines() == ["rank 0 begins", "rank 0 stopped"]
    assert f"stop:{pid}" in told(paths)
    assert not processes_of(paths.root)
    # A request to this run must not stop a later one.
    (paths.root / "stand_in_stop").unlink()
    (paths.root / "told").unlink()
    second = supervise(paths)
    wait_for_steps(paths, step=20, after=before)
    wait_for(lambda: bool(told(paths)), "the head to be told something")
    assert told(paths) == {"ping"} and second.poll() is None
    ask_to_stop(paths, second)
    assert second.wait(DEADLINE_S) == ExitCode.OK
    assert state_of(paths).status == "stopped"


@pytest.mark.slow
def test_a_system_s_signal_saves_and_the_node_is_still_left_clean(
    tmp_path: Path, port: int
) -> None:
    # The scheduler did not send it, as it has no knowledge of a supervisor outside the job.
    paths = plan_off_head(tmp_path / "run", port=port)
    supervisor = supervise(paths)
    wait_for_steps(paths)
    supervisor.terminate()
    assert supervisor.wait(DEADLINE_S) == ExitCode.RANK_LOST
    assert "the ranks saved and ended" in str(state_of(paths).error)
    assert "end:1" in told(paths)
    assert not processes_of(paths.root)


@pytest.mark.slow
def test_ranks_that_do_not_stop_in_time_are_killed_on_their_node(tmp_path: Path, port: int) -> None:
    paths = plan_off_head(tmp_path / "run", "--deaf", port=port)
    supervisor = supervise(paths, "--grace", "0.5")
    wait_for_steps(paths)
    ask_to_stop(paths, supervisor)
    assert supervisor.wait(DEADLINE_S) == ExitCode.HANG
    assert "did not stop in time and were killed" in str(state_of(paths).error)
    assert not processes_of(paths.root)


def test_a_killed_rank_0_is_named_from_its_node_s_heartbeats(tmp_path: Path, port: int) -> None:
    paths = plan_off_head(tmp_path / "run", port=port)
    supervisor = supervise(paths)
    pid, _ = wait_for_steps(paths)
    os.kill(pid, signal.SIGKILL)
    assert supervisor.wait(DEADLINE_S) == ExitCode.RANK_LOST
    assert "rank 0" in str(state_of(paths).error)
    assert "was killed by signal 9 (SIGKILL)" in str(state_of(paths).error)
    assert not processes_of(paths.root)
