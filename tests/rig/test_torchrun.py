"""torchrun on several machines: the same training as with mpirun, under the same supervision."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.run_record.run_files import RunPaths, RunState, read_json
from tests.orchestrate.operator import Operator
from tests.rig.conftest import FEW_STEPS
from tests.rig.leftovers import HOME, assert_nothing_is_left
from tests.rig.machine import Machine
from tests.rig.sweep import processes_of
from tests.support.launching import losses, metrics, summary
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.timeout(900)]

TORCHRUN = "launch.launcher=torchrun"
HANG_S = 9.0


def test_torchrun_on_three_machines_trains_what_mpirun_trains(
    operator: Operator,
    machines: list[Machine],
    operator_key: Path,
    trained_by_mpirun: RunPaths,
) -> None:
    code, output = operator.do(*operator.on_cluster("preflight"), *operator.set_words(TORCHRUN))
    assert code == ExitCode.OK, output
    arguments = operator.run_words("torchrun", f"train.steps={FEW_STEPS}", TORCHRUN)
    code, output = operator.do(*arguments)
    assert code == ExitCode.OK and "3 node(s) through torchrun" in output, output
    trained = operator.paths("torchrun").root
    for root in (trained, trained_by_mpirun.root):
        result = summary(root)
        assert (result["world_size"], result["ranks_identical"]) == (3, True)
    assert losses(trained) == pytest.approx(losses(trained_by_mpirun.root), rel=1e-6)
    assert_nothing_is_left(machines, operator_key)


@pytest.mark.seeds
def test_a_killed_worker_is_41_a_frozen_machine_42_and_the_run_ends_0_after_both(
    operator: Operator, machines: list[Machine], operator_key: Path
) -> None:
    settings = ("train.steps=100000", "train.checkpoint_every=20", "limits.max_restarts=1")
    hang = f"limits.hang_timeout_s={HANG_S}"
    arguments = operator.run_words("torn", *settings, TORCHRUN, hang)
    code, output = operator.do(*arguments, "--quick", "--detach")
    assert code == ExitCode.OK, output
    remote_run = machines[0].root / HOME / "tileforge/runs/torn"
    wait_until(lambda: any(remote_run.glob("checkpoints/step_*0")), what="one")
    kill_the_rank(machines[2])
    wait_until(lambda: state_in(remote_run).attempt == 2, what="a restart")
    note = str(state_in(remote_run).note)
    assert (
        "rank 2 on node-2 was killed by signal 9 (SIGKILL)" in note and "(restart 1 of 1)" in note
    )
    seen = len(metrics(remote_run))
    wait_until(lambda: len(metrics(remote_run)) > seen, what="further steps")
    machines[2].freeze()
    try:
        wait_until(
            lambda: state_in(remote_run).exit_class is not None,
            what="the end",
        )
    finally:
        machines[2].thaw()
    assert state_in(remote_run).exit_class == "hang", state_in(remote_run)
    assert "node frozen (accepts connections, but does not answer): node-2" in str(
        state_in(remote_run).error
    )
    code, output = operator.do("attach", "torn")
    assert code == ExitCode.HANG, output
    steps = metrics(remote_run)[-1]["step"] + 20
    more = operator.set_words(f"train.steps={steps}")
    code, output = operator.do(*operator.on_cluster("run"), "--resume", "torn", *more)
    assert code == ExitCode.OK, output
    assert len(losses(operator.paths("torn").root)) == steps
    assert_nothing_is_left(machines, operator_key)


def test_a_killed_worker_without_a_restart_ends_the_run_with_41(
    operator: Operator, machines: list[Machine], operator_key: Path
) -> None:
    settings = ("train.steps=100000", "train.checkpoint_every=0", "limits.max_restarts=0")
    started = operator.start(*operator.run_words("short", *settings, TORCHRUN), "--quick")
    operator.wait_for_a_step("short")
    kill_the_rank(machines[1])
    output = "".join(started.communicate(timeout=DEADLINE_S))
    assert started.returncode == ExitCode.RANK_LOST, output
    assert "rank 1 on node-1 was killed by signal 9 (SIGKILL)" in output
    assert_nothing_is_left(machines, operator_key)


def kill_the_rank(machine: Machine) -> None:
    """Kill the trainer on a machine with one rank."""
    (rank,) = [each for each in processes_of(machine) if "-m payload.train" in each.command]
    machine.exec(["pkill", "-KILL", "-f", "^[^ ]*python[^ ]* -m payload[.]train "])
    assert rank.user == "trainer"


def state_in(folder: Path) -> RunState:
    """Return a run's state on the head."""
    found = read_json(RunState, folder / "state.json")
    assert found is not None
    return found
