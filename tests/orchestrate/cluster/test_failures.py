"""What becomes of a run when a node of it fails: real sshd, mpirun and trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from payload.errors import ExitCode
from payload.results import RunPaths, RunState, read_metrics
from tests.launching import losses, summary
from tests.orchestrate.cluster.operating import (
    TIMEOUT_S,
    Operator,
    wait_for_nobody,
)
from tests.orchestrate.cluster.separate import SeparateNodes
from tests.supervise.planned import state_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.sshd, pytest.mark.ranks]
HANG_S = 9.0
ENDLESS = (
    "train.steps=100000",
    "train.checkpoint_every=0",
    "limits.max_restarts=0",
    f"limits.hang_timeout_s={HANG_S:g}",
)


@pytest.fixture(params=[False])
def operator(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Operator]:
    with SeparateNodes(tmp_path, num_nodes=2, linked=request.param) as nodes:
        yield Operator(tmp_path, nodes)


def start_run(operator: Operator, run_id: str, *settings: str) -> RunPaths:
    """Start a run, and wait for a step of it; the folder on the head."""
    code, said = operator.do(*operator.run_words(run_id, *settings), "--detach")
    assert code == ExitCode.OK, said
    paths = RunPaths(operator.nodes.home_of(0) / "tileforge" / "runs" / run_id)
    wait_until(lambda: last_step(paths) > 0, what="the first step", timeout_s=TIMEOUT_S)
    return paths


def last_step(paths: RunPaths) -> int:
    return max((row["step"] for row in read_metrics(paths.metrics)), default=0)


def run_until_it_fails(
    operator: Operator, run_id: str, fail: Callable[[], None]
) -> tuple[RunState, float]:
    """Start a run and let it fail after a step; how it ended, and seconds from then to the end."""
    paths = start_run(operator, run_id, *ENDLESS)
    fail()
    began = time.monotonic()
    wait_until(
        lambda: state_of(paths).status == "failed",
        what="the supervisor's verdict",
        timeout_s=TIMEOUT_S,
    )
    return state_of(paths), time.monotonic() - began


def test_a_frozen_node_is_42_and_a_killed_one_41_each_by_its_name(operator: Operator) -> None:
    nodes = operator.nodes
    state, took_s = run_until_it_fails(operator, "one", lambda: nodes.freeze(1))
    assert state.exit_class == "hang", state
    error = str(state.error)
    assert "node frozen, it takes connections but does not answer: node-1" in error
    assert "node-1 does not answer, so the run's processes there could not be ended" in error
    assert HANG_S - 2 < took_s < HANG_S + 30
    wait_until(lambda: not nodes.processes_of(0), what="all processes on the head to end")
    nodes.thaw(1)
    code, said = operator.do("attach", "one")
    assert code == ExitCode.HANG and error in said, said
    wait_for_nobody(operator)
    state, _ = run_until_it_fails(operator, "two", lambda: nodes.kill_node(1))
    assert state.exit_class == "rank_lost", state
    assert "node lost: node-1 cannot be reached" in str(state.error)
    wait_until(lambda: not nodes.processes_of(0), what="all processes on the head to end")


@pytest.mark.parametrize("operator", [True], indirect=True)
def test_a_cut_link_is_a_lost_node_and_the_run_goes_on_once_it_is_back(
    operator: Operator,
) -> None:
    link = operator.nodes.links[1]
    steps = 100
    paths = start_run(operator, "one", f"train.steps={steps}", "train.checkpoint_every=5")
    wait_until(
        lambda: paths.newest_checkpoint() is not None, what="a checkpoint", timeout_s=TIMEOUT_S
    )
    link.unplug()
    began = time.monotonic()
    wait_until(lambda: bool(state_of(paths).note), what="the verdict", timeout_s=TIMEOUT_S)
    # gloo would have waited for 600 s.
    assert time.monotonic() - began < 60
    note = str(state_of(paths).note)
    assert "node lost: node-1 cannot be reached" in note, note
    assert "Going on from checkpoint step_" in note and "(restart 1 of 3)" in note
    assert not [line for line in operator.nodes.processes_of(0) if "payload.train" in line]
    link.plug()
    wait_until(lambda: state_of(paths).exit_class is not None, what="the end", timeout_s=TIMEOUT_S)
    state, result = state_of(paths), summary(paths.root)
    assert (state.status, state.attempt, result["restarts"]) == ("finished", 2, 1), state
    assert result["ranks_identical"] is True
    assert len(losses(paths.root)) == steps
    wait_for_nobody(operator)
