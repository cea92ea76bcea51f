"""Clusters whose machines are deleted: the run goes on from its bucket on new machines."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from payload.checkpoint_files import manifest_problems
from payload.errors import ExitCode
from payload.inventory import ClusterInventory
from payload.results import RunPaths, RunState, Summary, read_json
from tests.orchestrate.operator import TIMEOUT_S, Operator
from tests.rig import prepared
from tests.rig.leftovers import HOME
from tests.rig.machine import Machine
from tests.rig.network import GATEWAY
from tests.rig.prepared import node_user_data
from tests.rig.rig import Rig
from tests.storage.server import BUCKET, Faults, FaultyProxy
from tests.support.launching import losses
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.rig, pytest.mark.timeout(1800)]

RESULTS = f"gs://{BUCKET}/runs"
STEPS, EVERY = 1000, 50
SETTINGS = (
    # Steps that take long enough for a machine to go in the middle of a run.
    "data.sequence_length=64",
    "model.n_layer=4",
    "model.n_embd=64",
    f"train.steps={STEPS}",
    f"train.checkpoint_every={EVERY}",
    "train.eval_every=500",
    "train.eval_tokens=64",
)
SEED = 20


@pytest.fixture(scope="module")
def rig(operator_key: Path) -> Iterator[Rig]:
    """Three clusters of two machines each, which install the bucket's client by their bootstrap."""
    public = operator_key.with_suffix(".pub").read_text(encoding="ascii")
    user_data = node_user_data(public, bucket="create")
    with Rig([user_data] * 6, layers=[prepared.layer()], wheels=("train", "storage")) as made:
        states = made.wait_for_bootstrap(timeout_s=900)
        assert all(state["ok"] for state in states.values()), states
        yield made


@pytest.fixture(scope="module")
def bucket(rig: Rig) -> Iterator[FaultyProxy]:
    """A bucket that machines and operators reach at the bridge's address."""
    with rig.joined():
        proxy = FaultyProxy(Faults(seed=SEED), host=GATEWAY)
    for machine in rig.machines:
        # sshd's sessions get it, as they get a cloud machine's own service account.
        with (machine.root / "etc/environment").open("a", encoding="ascii") as file:
            file.write(f"STORAGE_EMULATOR_HOST={proxy.url}\n")
    with proxy:
        yield proxy


class People:
    """Operators, each with a folder of their own, who reach the same clusters and bucket."""

    def __init__(self, rig: Rig, bucket: FaultyProxy, *, key: Path, folder: Path) -> None:
        self._rig = rig
        self._store = {"STORAGE_EMULATOR_HOST": bucket.url}
        self._key = key
        self._folder = folder

    def operator(self, name: str, *, cluster: int) -> Operator:
        """Return someone who has not been here before, with the inventory of a cluster."""
        folder = self._folder / name
        folder.mkdir()
        return Operator(
            folder,
            self.inventory_of(cluster),
            key=self._key,
            around=self._rig.operator_argv,
            secrets=self._store,
        )

    def inventory_of(self, cluster: int) -> ClusterInventory:
        found = self._rig.inventory()
        nodes = found.nodes[2 * cluster : 2 * cluster + 2]
        return replace(found, cluster=f"cluster-{cluster}", nodes=nodes)


@pytest.fixture(scope="module")
def people(
    rig: Rig, bucket: FaultyProxy, operator_key: Path, tmp_path_factory: pytest.TempPathFactory
) -> People:
    return People(rig, bucket, key=operator_key, folder=tmp_path_factory.mktemp("people"))


def delete_in_the_middle(
    machines: Sequence[Machine], bucket: FaultyProxy, run_id: str, *, after: int, wait_s: float
) -> None:
    """Take the power of all machines at once, some time after a checkpoint past step `after`."""
    there = machines[0].root / HOME / "tileforge/runs" / run_id

    def steps() -> list[int]:
        ends = f"runs/{run_id}/checkpoints/step_"
        names = [name for name in bucket.server.names() if name.startswith(ends)]
        whole = [name for name in names if name.endswith("/manifest.json")]
        return [int(name.removeprefix(ends).split("/")[0]) for name in whole]

    wait_until(
        lambda: max(steps(), default=0) > after,
        what=f"a checkpoint of {run_id} in the bucket",
        timeout_s=TIMEOUT_S,
    )
    time.sleep(wait_s)
    for machine in machines:
        machine.cut_link()
    for machine in machines:
        machine.kill()
    state = read_json(RunState, there / "state.json")
    assert state is not None and state.exit_class is None, "the run ended before its machines did"


def test_a_run_whose_machines_are_deleted_twice_ends_bitwise_equal_on_new_ones(
    rig: Rig, bucket: FaultyProxy, people: People
) -> None:
    draw = random.Random(SEED)
    first = people.operator("first", cluster=0)
    words = first.run_words("lost", *SETTINGS, f"storage.results={RESULTS}")
    code, said = first.do(*words, "--quick", "--detach")
    assert code == ExitCode.OK, said
    bucket.faults.share = 0.1
    delete_in_the_middle(rig.machines[:2], bucket, "lost", after=0, wait_s=draw.uniform(0, 2))

    # Someone else, who has neither the run's folder nor its settings.
    second = people.operator("second", cluster=1)
    resume = [*second.on_cluster("run"), "--quick"]
    words = [*resume, "--resume", f"{RESULTS}/lost", "--set", f"data.dir={second.data}"]
    code, said = second.do(*words, "--detach")
    assert code == ExitCode.OK, said
    delete_in_the_middle(rig.machines[2:4], bucket, "lost", after=EVERY, wait_s=draw.uniform(0, 2))

    # The same person on the third cluster, whose copy says that the run goes on.
    second.write_inventory(people.inventory_of(2))
    code, said = second.do(*resume, "--resume", f"{RESULTS}/lost")
    assert code == ExitCode.CONFIG and "mirror.json, and resume again" in said, said
    (second.paths("lost").root / "mirror.json").unlink()
    code, said = to_the_end(second, *resume, "--resume", f"{RESULTS}/lost")
    assert code == ExitCode.OK, said
    assert bucket.injected.total() > 0
    bucket.faults.share = 0.0

    whole = second.run_words("whole", *SETTINGS, "storage.results=none")
    code, said = to_the_end(second, *whole, "--quick")
    assert code == ExitCode.OK, said
    assert_same_end(second.paths("whole"), second.paths("lost"))
    summary = read_json(Summary, second.paths("lost").summary)
    assert summary is not None and summary.status == "finished" and summary.world_size == 2
    assert summary.store is not None and summary.store.is_drained
    # The bucket has the same, for someone without any machine.
    third = people.operator("third", cluster=2)
    code, said = third.do("collect", f"{RESULTS}/lost")
    assert code == ExitCode.OK, said
    assert_same_end(second.paths("whole"), third.paths("lost"))


def to_the_end(operator: Operator, *words: str) -> tuple[int, str]:
    """Wait for a run and its uploads, which take longer than other commands here."""
    with operator.start(*words) as command:
        out, err = command.communicate(timeout=600)
    return command.returncode, out + err


def assert_same_end(whole: RunPaths, lost: RunPaths) -> None:
    assert len(losses(whole.root)) == STEPS
    assert losses(whole.root) == losses(lost.root)
    last = [paths.checkpoint(STEPS) for paths in (whole, lost)]
    assert [manifest_problems(folder) for folder in last] == [[], []]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()
