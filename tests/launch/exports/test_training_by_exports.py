"""The command parts of exported files train on two machines, as each engine starts them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from payload.launch.exports.base import MASTER_PORT, ExportJob
from payload.launch.exports.registry import ENGINES, export_job
from payload.run_config import RunConfig, parse_run_config
from tests.launch.exports.kubelet import expand
from tests.launch.exports.pods import Pods, job_secret
from tests.launch.inventories import make_inventory
from tests.support.data_folders import make_data_folder
from tests.support.launching import TINY_RUN, losses, summary, train
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

STEPS = 6
LONG = 40
TIMEOUT_S = 120
NODES = ("node-0", "node-1")


def config(*overrides: str, data: str = "data/tiny") -> RunConfig:
    """A model that trains in seconds."""
    return parse_run_config(TINY_RUN.format(data=data), overrides=overrides, where="test")


def job_for(engine: str, *overrides: str, ranks_per_node: int = 1) -> ExportJob:
    """The run on two nodes."""
    settings = config(*overrides)
    launch = replace(settings.launch, ranks_per_node=ranks_per_node, threads_per_rank=1)
    return export_job(
        replace(settings, launch=launch),
        run_id="tiny",
        spec=settings.model.spec(sequence_length=32, vocab_size=None),
        inventory=make_inventory(),
        domains={},
        nodes=2,
        image="our-own:1",
        storage={"skypilot": "gs://runs", "dstack": "/mnt/nfs"}.get(engine),
    )


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same run in one process."""
    folder = tmp_path_factory.mktemp("here")
    data = make_data_folder(folder / "data")
    file = folder / "run.toml"
    file.write_text(config(f"train.steps={STEPS}", data=str(data)).to_toml(), encoding="utf-8")
    train(folder / "run", file)
    return losses(folder / "run")


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """Two nodes and, for those engines that have one, the launcher's."""
    names = {
        name: [f"tiny-node-0-{i}.tiny", f"tiny-worker-{i}.tiny.default.svc"]
        for i, name in enumerate(NODES)
    }
    names["tiny-launcher"] = []
    with Pods(tmp_path / "pods", names) as pods:
        make_data_folder(pods.storage / "data" / "tiny")
        yield pods


def finish(started: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for every node's end, which is a good one."""
    said = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)


def assert_trained(pods: Pods, here: list[float], *, world_size: int) -> None:
    """The run's folder is where the file says, with the losses of one process."""
    run = pods.storage / "runs" / "tiny"
    result = summary(run)
    assert (result["status"], result["world_size"]) == ("finished", world_size)
    assert losses(run) == pytest.approx(here, rel=1e-5)
    assert (run / "checkpoints" / f"step_{STEPS:08d}").is_dir()


def test_skypilot_s_task_trains_what_one_process_trains(pods: Pods, here: list[float]) -> None:
    finish(start_skypilot(pods, job_for("skypilot", f"train.steps={STEPS}", ranks_per_node=2)))
    assert_trained(pods, here, world_size=4)


def start_skypilot(pods: Pods, job: ExportJob) -> list[subprocess.Popen[str]]:
    """Start `run` on every node with SkyPilot's variables."""
    task = yaml.safe_load(ENGINES["skypilot"].render(job))
    addresses = "\n".join(pods.address_of(name) for name in NODES)
    given = {"SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NUM_NODES": "2"}
    return [
        pods.start(
            name,
            ["bash", "-c", task["run"]],
            env={**task["envs"], **given, "SKYPILOT_NODE_RANK": str(rank)},
        )
        for rank, name in enumerate(NODES)
    ]


def test_a_restarted_task_resumes_from_its_newest_checkpoint(pods: Pods) -> None:
    settings = (f"train.steps={LONG}", "train.checkpoint_every=20")
    first = start_skypilot(pods, job_for("skypilot", *settings))
    run = pods.storage / "runs" / "tiny"
    wait_until(
        lambda: any(run.glob("checkpoints/step_*0/manifest.json")) or first[0].poll() is not None,
        what="a checkpoint",
        timeout_s=TIMEOUT_S,
    )
    for process in first:
        process.kill()
    for process in first:
        process.wait(TIMEOUT_S)
    before = len(losses(run))
    assert 20 <= before <= LONG
    again = start_skypilot(pods, job_for("skypilot", *settings))
    said = [process.communicate(timeout=TIMEOUT_S)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], "\n".join(said)
    assert "step   1/" not in said[0] and "step 1/" not in said[0], said[0]
    assert len(losses(run)) == LONG and summary(run)["status"] == "finished"


def test_dstack_s_task_trains_what_one_process_trains(pods: Pods, here: list[float]) -> None:
    job = job_for("dstack", f"train.steps={STEPS}")
    task = yaml.safe_load(ENGINES["dstack"].render(job))
    given = {
        "DSTACK_NODES_NUM": "2",
        "DSTACK_MASTER_NODE_IP": pods.address_of(NODES[0]),
        "DSTACK_NODES_IPS": "\n".join(pods.address_of(name) for name in NODES),
    }
    # It joins the commands so.
    command = [task["shell"], "-c", " && ".join(task["commands"])]
    finish(
        [
            pods.start(name, command, env={**task["env"], **given, "DSTACK_NODE_RANK": str(rank)})
            for rank, name in enumerate(NODES)
        ]
    )
    assert_trained(pods, here, world_size=2)


def test_a_trainjob_trains_what_one_process_trains(pods: Pods, here: list[float]) -> None:
    job = job_for("trainjob", f"train.steps={STEPS}")
    runtime, wanted = yaml.safe_load_all(ENGINES["trainjob"].render(job))
    trainer = wanted["spec"]["trainer"]
    replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    # As the operator's torch plugin does it (pkg/runtime/framework/plugins/torch/torch.go).
    given = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"tiny-{replicated['name']}-0-0.tiny",
        "PET_MASTER_PORT": str(MASTER_PORT),
    }
    env = {**values_of(trainer["env"]), **given}
    finish(
        [
            pods.start(name, container_argv(trainer, env), env={**env, "PET_NODE_RANK": str(rank)})
            for rank, name in enumerate(NODES)
        ]
    )
    assert_trained(pods, here, world_size=2)


def values_of(variables: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """A container's environment as a mapping."""
    return {each["name"]: each["value"] for each in variables}


def container_argv(container: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """The command as the kubelet starts it."""
    return [expand(word, env) for word in container["command"]]


def test_an_mpijob_trains_from_its_hosts_file_with_the_key_of_its_secret(
    pods: Pods, here: list[float], tmp_path: Path
) -> None:
    job = job_for("mpijob", f"train.steps={STEPS}", ranks_per_node=2)
    spec = yaml.safe_load(ENGINES["mpijob"].render(job))["spec"]
    containers = {
        role: replica["template"]["spec"]["containers"][0]
        for role, replica in spec["mpiReplicaSpecs"].items()
    }
    slots, secret = spec["slotsPerWorker"], job_secret(tmp_path / "secret")
    hosts = "".join(f"tiny-worker-{i}.tiny.default.svc:{slots}\n" for i in range(2))
    workers = [
        pods.start(name, container_argv(containers["Worker"], {}), env={}, secret=secret)
        for name in NODES
    ]
    # The operator adds these, and they must not get in the way.
    given = {
        "I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-o ConnectionAttempts=10",
        "I_MPI_PERHOST": str(slots),
    }
    launcher = pods.start(
        "tiny-launcher",
        container_argv(containers["Launcher"], given),
        env=given,
        secret=secret,
        hostfile=hosts,
    )
    finish([launcher])
    assert_trained(pods, here, world_size=4)
    assert [worker.poll() for worker in workers] == [None, None]


def test_a_worker_without_the_job_s_secret_is_not_let_into_the_job(
    pods: Pods, tmp_path: Path
) -> None:
    job = job_for("mpijob", f"train.steps={STEPS}")
    spec = yaml.safe_load(ENGINES["mpijob"].render(job))["spec"]
    replicas = spec["mpiReplicaSpecs"]
    launcher = replicas["Launcher"]["template"]["spec"]["containers"][0]
    worker = replicas["Worker"]["template"]["spec"]["containers"][0]
    secret, foreign = job_secret(tmp_path / "secret"), job_secret(tmp_path / "foreign")
    # A stranger who would let the launcher in, and shows another host key.
    (foreign / "authorized_keys").write_bytes((secret / "id_rsa.pub").read_bytes())
    for name, known in zip(NODES, (secret, foreign), strict=True):
        pods.start(name, container_argv(worker, {}), env={}, secret=known)
    hosts = "".join(f"tiny-worker-{i}.tiny.default.svc:1\n" for i in range(2))
    started = pods.start(
        "tiny-launcher", container_argv(launcher, {}), env={}, secret=secret, hostfile=hosts
    )
    said = started.communicate(timeout=TIMEOUT_S)[0]
    # ssh's own status, 255; mpirun keeps what it said to itself.
    assert "Unable to run bstrap_proxy on tiny-worker-1" in said and "code 65280" in said, said
    assert (
        started.returncode != 0 and not (pods.storage / "runs" / "tiny" / "metrics.jsonl").exists()
    )
