"""Failures of a rank, a machine or all machines of a run whose ranks hold shards of one model."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.formats.checkpoint_listing import (
    checkpoint_folders,
    manifest_problems,
    partial_checkpoints,
)
from payload.run_record.run_files import RunPaths, RunState, read_json
from tests.orchestrate.operator import Operator
from tests.rig import prepared
from tests.rig.leftovers import HOME, marked
from tests.rig.machine import Machine
from tests.rig.prepared import node_user_data
from tests.rig.rig import Rig
from tests.rig.sweep import processes_of
from tests.support.launching import losses, metrics
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.timeout(1800)]

SHARD = ("distributed.strategy=shard",)
PIPELINE = ("distributed.pipeline_parallel=2", "model.n_layer=2")
BOTH = pytest.mark.parametrize(
    "settings",
    [SHARD, pytest.param(PIPELINE, marks=pytest.mark.seeds)],
    ids=["shard", "pipeline"],
)
ENDLESS = (
    "train.steps=100000",
    "train.checkpoint_every=0",
    "limits.max_restarts=0",
    "limits.hang_timeout_s=9",
)
STEPS = 60


@pytest.fixture(scope="module")
def pair(operator_key: Path) -> Iterator[Rig]:
    """Yield a head and a worker that become ready in seconds with prepared packages."""
    public = operator_key.with_suffix(".pub").read_text(encoding="ascii")
    with Rig([node_user_data(public)] * 2, layers=[prepared.layer()]) as rig:
        states = rig.wait_for_bootstrap(timeout_s=DEADLINE_S)
        assert all(state["ok"] for state in states.values()), states
        yield rig


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of this cluster's operator, separate from those of other modules."""
    return tmp_path_factory.mktemp("pair")


@pytest.fixture
def two_machines(pair: Rig, pair_folder: Path, operator_key: Path) -> Operator:
    """Return the operator of the two machines, with their current host keys."""
    return Operator(pair_folder, pair.inventory(), key=operator_key, around=pair.operator_argv)


def head_run(pair: Rig, run_id: str) -> RunPaths:
    """Return the head's folder of a run."""
    return RunPaths(pair.machines[0].root / HOME / "tileforge/runs" / run_id)


def start(operator: Operator, pair: Rig, run_id: str, *settings: str) -> RunPaths:
    """Start a detached run, and wait for its first step."""
    code, output = operator.do(*operator.run_words(run_id, *settings), "--quick", "--detach")
    assert code == ExitCode.OK, output
    remote_run = head_run(pair, run_id)
    wait_until(
        lambda: remote_run.metrics.exists() and bool(metrics(remote_run.root)),
        what=f"the first step of {run_id}",
    )
    return remote_run


def wait_for_verdict(remote_run: RunPaths) -> RunState:
    """Wait for the run's final state on the head and return it."""

    def state() -> RunState:
        found = read_json(RunState, remote_run.root / "state.json")
        assert found is not None
        return found

    wait_until(lambda: state().exit_class is not None, what="the end")
    return state()


def signal_rank(machine: Machine, number: signal.Signals) -> None:
    """Send a signal to the only rank of a machine."""
    ranks = [each for each in processes_of(machine) if "-m payload.train" in each.command]
    assert ranks, [each.command for each in processes_of(machine)]
    for each in ranks:
        os.kill(each.pid, number)


@BOTH
def test_a_killed_rank_of_a_machine_is_41_by_its_name(
    two_machines: Operator, pair: Rig, settings: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    run_id = f"killed-{request.node.callspec.id}"
    remote_run = start(two_machines, pair, run_id, *settings, *ENDLESS)
    signal_rank(pair.machines[1], signal.SIGKILL)
    state = wait_for_verdict(remote_run)
    assert state.exit_class == "rank_lost", state
    assert "rank 1 on node-1 was killed by signal 9 (SIGKILL)" in str(state.error), state
    code, output = two_machines.do("attach", run_id)
    assert code == ExitCode.RANK_LOST and "node-1" in output, output


@pytest.mark.seeds
@BOTH
def test_a_frozen_machine_is_42_by_its_name(
    two_machines: Operator, pair: Rig, settings: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    run_id = f"frozen-{request.node.callspec.id}"
    remote_run = start(two_machines, pair, run_id, *settings, *ENDLESS)
    pair.machines[1].freeze()
    try:
        state = wait_for_verdict(remote_run)
    finally:
        pair.machines[1].thaw()
    assert state.exit_class == "hang", state
    error = str(state.error)
    assert "node frozen (accepts connections, but does not answer): node-1" in error, state
    code, output = two_machines.do("attach", run_id)
    assert code == ExitCode.HANG and "node-1" in output, output
    wait_until(lambda: not any(map(marked, pair.machines)), what="all to end")


@BOTH
def test_after_a_power_loss_during_a_checkpoint_the_one_before_is_used(
    two_machines: Operator, pair: Rig, settings: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    run_id = f"dark-{request.node.callspec.id}"
    few = (*settings, f"train.steps={STEPS}", "train.checkpoint_every=2")
    remote_run = start(two_machines, pair, run_id, *few, "train.keep_checkpoints=100")
    written = cut_power_during_a_checkpoint(pair, remote_run)
    left = checkpoint_folders(remote_run.checkpoints)
    assert left and written not in [each.name for each in left]
    assert not any(map(manifest_problems, left))
    newest = max(int(each.name.rpartition("_")[2]) for each in left)
    for machine in pair.machines:
        machine.restore_link()
        machine.start()
        machine.wait_for_ssh()
    code, output = two_machines.do(*two_machines.on_cluster("run"), "--resume", run_id)
    assert code == ExitCode.OK, output
    assert re.search(rf"step[_ ]0*{newest}\b", output), output
    assert len(losses(two_machines.paths(run_id).root)) == STEPS


def cut_power_during_a_checkpoint(pair: Rig, remote_run: RunPaths) -> str:
    """Power off the machines while the second or a later checkpoint is written; return its name.

    The machines are frozen first to check that it is still incomplete: powering off takes long on a
    busy host.
    """
    ends_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends_s:
        if not partial_checkpoints(remote_run.checkpoints):
            continue
        for machine in pair.machines:
            machine.freeze()
        partial = partial_checkpoints(remote_run.checkpoints)
        if partial and checkpoint_folders(remote_run.checkpoints):
            for machine in pair.machines:
                machine.kill()
            return partial[0].name.partition(".")[0]
        for machine in pair.machines:
            machine.thaw()
    raise AssertionError("no checkpoint was observed while it was written")
