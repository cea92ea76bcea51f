"""A cluster whose machines are deleted: the run resumes from its bucket on new machines."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.formats.checkpoint_listing import manifest_problems
from payload.run_record.run_files import RunPaths, RunState, Summary, read_json
from tests.orchestrate.operator import Operator
from tests.rig import prepared
from tests.rig.leftovers import HOME
from tests.rig.machine import Machine
from tests.rig.network import GATEWAY
from tests.rig.prepared import node_user_data
from tests.rig.rig import Rig
from tests.rig.sweep import processes_of
from tests.storage.server import BUCKET, Faults, FaultyProxy
from tests.support.launching import losses
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.timeout(1800)]

RESULTS = f"gs://{BUCKET}/runs"
HUB = "HF_HOME=/srv/tileforge/shared/hub"
EVERY = 10
SETTINGS = (
    f"train.checkpoint_every={EVERY}",
    "schedule.kind=constant",
    "train.eval_every=0",
    "track.to=none",
)


@pytest.fixture(scope="module")
def two_clusters(operator_key: Path) -> Iterator[Rig]:
    """Yield four machines, two per cluster, whose bootstrap installs the bucket's client."""
    public = operator_key.with_suffix(".pub").read_text(encoding="ascii")
    user_data = node_user_data(public, bucket="create")
    with Rig([user_data] * 4, layers=[prepared.layer()], wheels=("train", "storage")) as rig:
        states = rig.wait_for_bootstrap(timeout_s=DEADLINE_S)
        assert all(state["ok"] for state in states.values()), states
        yield rig


@pytest.fixture(scope="module")
def bucket(two_clusters: Rig) -> Iterator[FaultyProxy]:
    """Yield a bucket that machines and operators reach at the bridge's address."""
    with two_clusters.joined():
        proxy = FaultyProxy(Faults(seed=20), host=GATEWAY)
    for machine in two_clusters.machines:
        # sshd's sessions read it; it replaces a cloud machine's service account. The bootstrap of a
        # cluster with sharedStorage also names the hub's cache in it.
        with (machine.root / "etc/environment").open("a", encoding="ascii") as file:
            file.write(f"STORAGE_EMULATOR_HOST={proxy.url}\n{HUB}\n")
    with proxy:
        yield proxy


def operator_of(
    rig: Rig, bucket: FaultyProxy, *, cluster: int, key: Path, folder: Path
) -> Operator:
    """Return an operator with a new folder, and the inventory of one of the clusters."""
    folder.mkdir()
    found = rig.inventory()
    nodes = found.nodes[2 * cluster : 2 * cluster + 2]
    return Operator(
        folder,
        replace(found, cluster=f"cluster-{cluster}", nodes=nodes),
        key=key,
        around=rig.operator_argv,
        secrets={"STORAGE_EMULATOR_HOST": bucket.url},
    )


def steps_in(bucket: FaultyProxy, run_id: str) -> list[int]:
    """Return the steps of a run's complete checkpoints in the bucket."""
    found = [
        re.fullmatch(rf"runs/{run_id}/checkpoints/step_(\d+)/manifest\.json", name)
        for name in bucket.server.names()
    ]
    return [int(each[1]) for each in found if each]


def delete_in_the_middle(
    machines: Sequence[Machine], bucket: FaultyProxy, run_id: str, *, wait_s: float
) -> None:
    """Power off all machines at the same time, a while after a checkpoint is in the bucket."""
    wait_until(
        lambda: bool(steps_in(bucket, run_id)), what=f"a checkpoint of {run_id} in the bucket"
    )
    for machine in machines:
        ranks = [each for each in processes_of(machine) if "-m payload.train" in each.command]
        assert ranks and all(HUB.encode() in each.environment for each in ranks)
    time.sleep(wait_s)
    for machine in machines:
        machine.cut_link()
    for machine in machines:
        machine.kill()
    there = machines[0].root / HOME / "tileforge/runs" / run_id
    state = read_json(RunState, there / "state.json")
    assert state is not None and state.exit_class is None, "the run ended before its machines"


def test_a_run_whose_machines_are_deleted_ends_bitwise_equal_on_new_ones(
    two_clusters: Rig, bucket: FaultyProxy, operator_key: Path, tmp_path: Path
) -> None:
    first = operator_of(
        two_clusters, bucket, cluster=0, key=operator_key, folder=tmp_path / "first"
    )
    endless = ("train.steps=100000", f"storage.results={RESULTS}")
    arguments = first.run_words("lost", *SETTINGS, *endless)
    code, output = first.do(*arguments, "--quick", "--detach")
    assert code == ExitCode.OK, output
    wait_s = random.Random(20).uniform(0, 2)
    delete_in_the_middle(two_clusters.machines[:2], bucket, "lost", wait_s=wait_s)
    steps = max(steps_in(bucket, "lost")) + 2 * EVERY

    # An operator with neither the run's folder nor its settings. The bucket's run.toml names a
    # folder of a deleted node, plan.json the first operator's: a person must confirm that.
    second = operator_of(
        two_clusters, bucket, cluster=1, key=operator_key, folder=tmp_path / "second"
    )
    arguments = [*second.on_cluster("run"), "--quick", "--resume", f"{RESULTS}/lost"]
    arguments += ["--set", "track.to=none", "--set", f"train.steps={steps}"]
    code, output = second.do(*arguments)
    assert code == ExitCode.CONFIG and f"--set data.dir={first.data}" in output, output
    code, output = second.do(*arguments, "--set", f"data.dir={first.data}")
    assert code == ExitCode.OK, output
    code, output = second.do(
        *second.run_words("whole", *SETTINGS, f"train.steps={steps}", "storage.results=none"),
        "--quick",
    )
    assert code == ExitCode.OK, output
    assert_same_end(second.paths("whole"), second.paths("lost"), steps=steps)
    summary = read_json(Summary, second.paths("lost").summary)
    assert summary is not None and summary.status == "finished" and summary.world_size == 2
    assert summary.resumes == 1 and summary.store is not None and summary.store.is_drained


def assert_same_end(whole: RunPaths, lost: RunPaths, *, steps: int) -> None:
    assert len(losses(whole.root)) == steps
    assert losses(whole.root) == losses(lost.root)
    last = [paths.checkpoint(steps) for paths in (whole, lost)]
    assert [manifest_problems(folder) for folder in last] == [[], []]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()
