"""Runs and preflight after the failure of a machine or of its link."""

from __future__ import annotations

import pytest

from payload.core.errors import ExitCode
from payload.run_record.run_files import RunState, read_json
from tests.orchestrate.operator import Operator
from tests.rig.leftovers import HOME, marked
from tests.rig.machine import Machine
from tests.support.launching import metrics
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.rig, pytest.mark.timeout(900)]

HANG_S = 9.0
ENDLESS = (
    "train.steps=100000",
    "train.checkpoint_every=0",
    "limits.max_restarts=0",
    f"limits.hang_timeout_s={HANG_S}",
)


def start_run(operator: Operator, machines: list[Machine], run_id: str) -> None:
    """Start a run that only a failure ends, and wait for its first step on the head."""
    code, output = operator.do(*operator.run_words(run_id, *ENDLESS), "--quick", "--detach")
    assert code == ExitCode.OK, output
    remote_run = machines[0].root / HOME / "tileforge/runs" / run_id
    wait_until(
        lambda: (remote_run / "metrics.jsonl").exists() and bool(metrics(remote_run)),
        what=f"the first step of {run_id}",
    )


def wait_for_the_verdict(machines: list[Machine], run_id: str) -> RunState:
    """Return the run's final state on the head."""
    path = machines[0].root / HOME / "tileforge/runs" / run_id / "state.json"

    def state() -> RunState:
        found = read_json(RunState, path)
        assert found is not None
        return found

    wait_until(lambda: state().exit_class is not None, what="the end")
    return state()


def wait_for_nobody(machines: list[Machine]) -> None:
    """Wait until no process of a run remains; the supervisor ends last, after its final state."""
    wait_until(lambda: not any(map(marked, machines)), what="all processes to end")


def test_a_link_of_1_mbit_per_s_is_a_warning_with_the_time_it_costs_a_step(
    operator: Operator, machines: list[Machine]
) -> None:
    machines[2].limit(mbit_per_s=1)
    try:
        code, output = operator.do(*operator.on_cluster("preflight"))
    finally:
        machines[2].unlimit()
    assert code == ExitCode.OK, output
    arguments = " ".join(output.split())
    assert "node-2: its link is slow" in arguments and "of synchronisation a step" in arguments, (
        output
    )


def test_a_frozen_machine_is_42_by_its_name(operator: Operator, machines: list[Machine]) -> None:
    start_run(operator, machines, "frozen")
    machines[2].freeze()
    try:
        state = wait_for_the_verdict(machines, "frozen")
        wait_for_nobody(machines[:2])
    finally:
        machines[2].thaw()
    assert state.exit_class == "hang", state
    error = str(state.error)
    assert "node frozen (accepts connections, but does not answer): node-2" in error
    assert "node-2 does not answer, so the run's processes on it could not be ended" in error
    assert "node-1" not in error, state
    code, output = operator.do("attach", "frozen")
    assert code == ExitCode.HANG and error in output, output
    wait_for_nobody(machines[2:])


def test_a_killed_machine_is_41_by_its_name(operator: Operator, machines: list[Machine]) -> None:
    start_run(operator, machines, "killed")
    machines[2].kill()
    try:
        state = wait_for_the_verdict(machines, "killed")
        assert state.exit_class == "rank_lost", state
        assert "node-2 cannot be reached" in str(state.error), state
        code, output = operator.do("attach", "killed")
        assert code == ExitCode.RANK_LOST and "node-2" in output, output
        wait_for_nobody(machines[:2])
    finally:
        machines[2].restore_link()
        machines[2].start()
        machines[2].wait_for_ssh()
