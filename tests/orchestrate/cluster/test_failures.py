"""A run whose node is cut off, returns and crashes: real sshd, mpirun and trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths, RunState
from tests.orchestrate.cluster.operating import Operator
from tests.orchestrate.cluster.separate import SeparateNodes
from tests.supervise.planned import state_of
from tests.support.launching import losses, summary
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.sshd, pytest.mark.ranks]


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    with SeparateNodes(tmp_path, num_nodes=2, linked=True) as nodes:
        yield Operator(tmp_path, nodes)


def start_run(operator: Operator, run_id: str, *settings: str) -> RunPaths:
    """Start a run, and wait for a step of it; return the folder on the head."""
    code, said = operator.do(*operator.run_words(run_id, *settings), "--detach")
    assert code == ExitCode.OK, said
    paths = RunPaths(operator.nodes.home_of(0) / "tileforge" / "runs" / run_id)
    wait_until(lambda: last_step(paths) > 0, what="the first step")
    return paths


def last_step(paths: RunPaths) -> int:
    return max((row["step"] for row in read_metrics(paths.metrics)), default=0)


def wait_for_the_end(paths: RunPaths) -> RunState:
    wait_until(lambda: state_of(paths).exit_class is not None, what="the end")
    return state_of(paths)


def test_a_run_continues_after_a_cut_link_and_ends_with_41_when_the_node_is_gone(
    operator: Operator,
) -> None:
    link = operator.nodes.links[1]
    settings = ("train.steps=100000", "train.checkpoint_every=5", "limits.max_restarts=1")
    paths = start_run(operator, "one", *settings)
    wait_until(lambda: paths.newest_checkpoint() is not None, what="a checkpoint")
    link.unplug()
    # Within this time: gloo would have waited for 600 s.
    wait_until(lambda: bool(state_of(paths).note), what="the verdict")
    note = str(state_of(paths).note)
    assert "node lost: node-1 cannot be reached" in note, note
    assert "Checking whether the run can be restarted" in note and state_of(paths).attempt == 1
    assert not [line for line in operator.nodes.processes_of(0) if "payload.train" in line]
    seen = last_step(paths)
    link.plug()
    wait_until(
        lambda: last_step(paths) > seen and state_of(paths).status == "running",
        what="steps beyond those before",
    )
    note = str(state_of(paths).note)
    assert "Continuing from checkpoint step_" in note and "(restart 1 of 1)" in note
    operator.nodes.kill_node(1)
    state = wait_for_the_end(paths)
    assert (state.exit_class, state.attempt) == ("rank_lost", 2), state
    assert "node lost: node-1 cannot be reached" in str(state.error)
    assert "limits.max_restarts = 1 is reached" in str(state.error)
    wait_until(lambda: not operator.nodes.processes_of(0), what="all processes on the head to end")
    result = summary(paths.root)
    assert (result["status"], result["restarts"]) == ("failed", 1)
    assert len(losses(paths.root)) == result["steps"] > seen
