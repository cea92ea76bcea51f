"""The commands in exported files train on machines, started as each engine starts them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from payload.launch.exports.base import MASTER_PORT, ExportJob
from payload.launch.exports.registry import ENGINES
from tests.launch.exports.jobs import job_for
from tests.launch.exports.kubelet import expand
from tests.rig.conftest import FEW_STEPS as STEPS
from tests.rig.conftest import TINY_STEPS
from tests.rig.machine import Machine
from tests.rig.slurm_cluster import CODE, IMAGE_ENV, PACKAGES, SHARED, SlurmCluster
from tests.support.launching import losses, summary
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.timeout(900)]

SERVICE = "container"
CHECKOUT = "checkout"


def exported(engine: str, *overrides: str, ranks_per_node: int = 2) -> ExportJob:
    """Return the run on two nodes, with the engine's name as its id."""
    return job_for(ENGINES[engine], *overrides, run_id=engine, ranks_per_node=ranks_per_node)


def run_of(cluster: SlurmCluster, engine: str) -> Path:
    """Return the run's folder in the storage."""
    return cluster.folder / "storage" / "runs" / engine


def assert_trained(
    cluster: SlurmCluster,
    engine: str,
    expected: Sequence[float],
    *,
    world_size: int,
    rel: float = 1e-6,
) -> None:
    """Assert that the run finished with the losses of one process."""
    run = run_of(cluster, engine)
    result = summary(run)
    assert (result["status"], result["world_size"]) == ("finished", world_size)
    assert losses(run) == pytest.approx(expected, rel=rel)
    assert (run / "checkpoints" / f"step_{len(expected):08d}").is_dir()


def finish(started: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Wait until every node has exited with 0; return their outputs."""
    output = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(output)
    return output


def start(
    machine: Machine, argv: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a container of the image on a machine."""
    return machine.start_service(SERVICE, argv, env={**IMAGE_ENV, **(env or {})})


@pytest.fixture
def nodes(cluster: SlurmCluster) -> Iterator[list[Machine]]:
    """Yield the two nodes, and check that no container remains."""
    yield cluster.nodes
    for machine in (cluster.login, *cluster.nodes):
        machine.kill_service(SERVICE)


def test_slurm_takes_the_batch_script_and_its_job_trains(
    cluster: SlurmCluster, one_process: list[float]
) -> None:
    checkout = make_checkout(cluster.folder / CHECKOUT)
    folder = f"{SHARED}/{CHECKOUT}"

    def submit(job: ExportJob, *options: str) -> tuple[int, str]:
        text = ENGINES["sbatch"].render(job)
        (checkout / "run.sbatch").write_text(text, encoding="utf-8")
        return cluster.type(["sbatch", *options, "run.sbatch"], folder=folder)

    storage = f"{SHARED}/storage"
    four = job_for(ENGINES["sbatch"], nodes=4, ranks_per_node=1)
    code, output = submit(four, "--test-only")
    assert code != 0 and "allocation failure" in output, output
    job = job_for(ENGINES["sbatch"], f"train.steps={STEPS}", run_id="sbatch", storage=storage)
    code, output = submit(job, "--test-only")
    assert code == 0 and "using 4 processors on nodes node-[1-2]" in output, output
    assert not run_of(cluster, "sbatch").exists()
    code, output = submit(job, "--wait")
    assert code == 0, output + "".join(each.read_text() for each in checkout.glob("*.log"))
    assert_trained(cluster, "sbatch", one_process[:STEPS], world_size=4)


def make_checkout(folder: Path) -> Path:
    """Make a checkout with its environment, as `bootstrap/install-payload.sh` does."""
    packages = folder / ".venv" / Path(PACKAGES).relative_to(Path(PACKAGES).parents[2])
    packages.parent.mkdir(parents=True)
    packages.symlink_to(PACKAGES)
    (folder / ".venv" / "bin").mkdir()
    for name in ("python", "python3"):
        (folder / ".venv" / "bin" / name).symlink_to("/usr/bin/python3")
    (folder / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\n", encoding="ascii")
    for name in ("payload", "bootstrap"):
        (folder / name).symlink_to(f"{CODE}/{name}")
    folder.chmod(0o777)
    return folder


def test_skypilot_s_task_trains_and_a_restarted_one_resumes(
    cluster: SlurmCluster, nodes: list[Machine], one_process: list[float]
) -> None:
    settings = (f"train.steps={TINY_STEPS}", "train.checkpoint_every=20")
    task = yaml.safe_load(ENGINES["skypilot"].render(exported("skypilot", *settings)))
    given = {
        **task["envs"],
        "SKYPILOT_NODE_IPS": "\n".join(node.address for node in nodes),
        "SKYPILOT_NUM_NODES": str(len(nodes)),
    }

    def start_all() -> list[subprocess.Popen[str]]:
        return [
            start(node, ["bash", "-c", task["run"]], {**given, "SKYPILOT_NODE_RANK": str(rank)})
            for rank, node in enumerate(nodes)
        ]

    run = run_of(cluster, "skypilot")
    first = start_all()
    wait_until(
        lambda: any(run.glob("checkpoints/step_*0/manifest.json")) or first[0].poll() is not None,
        what="a checkpoint",
    )
    for node in nodes:
        node.kill_service(SERVICE)
    for process in first:
        process.wait(DEADLINE_S)
    assert 20 <= len(losses(run)) <= TINY_STEPS
    output = finish(start_all())
    assert "step 1:" not in output[0] and "resum" in output[0], output[0]
    assert_trained(cluster, "skypilot", one_process, world_size=4, rel=1e-5)


def test_dstack_s_task_trains(
    cluster: SlurmCluster, nodes: list[Machine], one_process: list[float]
) -> None:
    job = exported("dstack", f"train.steps={STEPS}", ranks_per_node=1)
    task = yaml.safe_load(ENGINES["dstack"].render(job))
    given = {
        **task["env"],
        "DSTACK_NODES_NUM": str(len(nodes)),
        "DSTACK_MASTER_NODE_IP": nodes[0].address,
        "DSTACK_NODES_IPS": "\n".join(node.address for node in nodes),
    }
    # The engine joins commands like this.
    command = [task["shell"], "-c", " && ".join(task["commands"])]
    finish(
        [
            start(node, command, {**given, "DSTACK_NODE_RANK": str(rank)})
            for rank, node in enumerate(nodes)
        ]
    )
    assert_trained(cluster, "dstack", one_process[:STEPS], world_size=2)


def test_a_trainjob_trains(
    cluster: SlurmCluster, nodes: list[Machine], one_process: list[float]
) -> None:
    job = exported("trainjob", f"train.steps={STEPS}", ranks_per_node=1)
    runtime, expected = yaml.safe_load_all(ENGINES["trainjob"].render(job))
    trainer = expected["spec"]["trainer"]
    replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    head = f"trainjob-{replicated['name']}-0-0.trainjob"
    add_names(nodes, {head: nodes[0]})
    # As in the operator's torch plugin (pkg/runtime/framework/plugins/torch/torch.go).
    given = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": head,
        "PET_MASTER_PORT": str(MASTER_PORT),
    }
    env = {each["name"]: each["value"] for each in trainer["env"]} | given
    finish(
        [
            start(node, container_argv(trainer, env), {**env, "PET_NODE_RANK": str(rank)})
            for rank, node in enumerate(nodes)
        ]
    )
    assert_trained(cluster, "trainjob", one_process[:STEPS], world_size=2)


def container_argv(container: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """Return the command as the kubelet starts it."""
    return [expand(word, env) for word in container["command"]]


def add_names(machines: Sequence[Machine], names: Mapping[str, Machine]) -> None:
    """Let machines resolve additional names of others, as with a cluster's DNS."""
    lines = "".join(f"{machine.address} {name}\n" for name, machine in names.items())
    for machine in machines:
        with (machine.live_root() / "etc/hosts").open("a", encoding="ascii") as file:
            file.write(lines)


class Pods:
    """Pods of an MPIJob: workers with sshd on the nodes, the launcher on the login node."""

    def __init__(self, cluster: SlurmCluster, job: ExportJob) -> None:
        spec = yaml.safe_load(ENGINES["mpijob"].render(job))["spec"]
        self._containers = {
            role: replica["template"]["spec"]["containers"][0]
            for role, replica in spec["mpiReplicaSpecs"].items()
        }
        self._slots = spec["slotsPerWorker"]
        self._secret = Path(spec["sshAuthMountPath"].lstrip("/"))
        self._cluster = cluster
        self.names = [f"mpijob-worker-{i}.mpijob.default.svc" for i in range(2)]

    def start_workers(self, secrets: Sequence[Path]) -> list[subprocess.Popen[str]]:
        """Start the workers, each with its secret."""
        started = []
        for machine, secret in zip(self._cluster.nodes, secrets, strict=True):
            # A pod only has its own sshd.
            machine.exec(["systemctl", "stop", "ssh"])
            self._mount(machine, secret)
            started.append(start(machine, container_argv(self._containers["Worker"], {})))
            machine.wait_for_ssh()
        return started

    def start_launcher(self, secret: Path) -> subprocess.Popen[str]:
        """Start the launcher with the operator's hosts file and variables."""
        machine = self._cluster.login
        self._mount(machine, secret)
        hosts = machine.live_root() / "etc/mpi/hostfile"
        hosts.parent.mkdir(exist_ok=True)
        hosts.write_text("".join(f"{name}:{self._slots}\n" for name in self.names), "ascii")
        # The operator adds these variables, which must not disturb the launcher.
        given = {
            "I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile",
            "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-o ConnectionAttempts=10",
            "I_MPI_PERHOST": str(self._slots),
        }
        return start(machine, container_argv(self._containers["Launcher"], given), given)

    def _mount(self, machine: Machine, secret: Path) -> None:
        """Write the secret's files, readable for all users."""
        folder = machine.live_root() / self._secret
        folder.mkdir(exist_ok=True)
        for file in secret.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
            (folder / file.name).chmod(0o644)


def job_secret(folder: Path) -> Path:
    """Make the secret of an MPI Operator's job: an ECDSA key pair that authorizes itself."""
    folder.mkdir()
    kind = ["-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", ""]
    subprocess.run(["ssh-keygen", "-q", *kind, "-f", str(folder / "id_rsa")], check=True)
    (folder / "authorized_keys").write_bytes((folder / "id_rsa.pub").read_bytes())
    return folder


def test_an_mpijob_trains_from_its_hosts_file_and_lets_no_pod_without_its_secret_in(
    cluster: SlurmCluster, nodes: list[Machine], one_process: list[float], tmp_path: Path
) -> None:
    pods = Pods(cluster, exported("mpijob", f"train.steps={STEPS}"))
    add_names([cluster.login, *nodes], dict(zip(pods.names, nodes, strict=True)))
    secret, foreign = job_secret(tmp_path / "secret"), job_secret(tmp_path / "foreign")
    # A host that would admit the launcher, but has a different host key.
    (foreign / "authorized_keys").write_bytes((secret / "id_rsa.pub").read_bytes())
    workers = pods.start_workers([secret, foreign])
    launcher = pods.start_launcher(secret)
    output = launcher.communicate(timeout=DEADLINE_S)[0]
    # 255 is ssh's own status; mpirun does not print ssh's output.
    assert f"Unable to run bstrap_proxy on {pods.names[1]}" in output and "code 65280" in output, (
        output
    )
    assert launcher.returncode != 0
    assert not (run_of(cluster, "mpijob") / "metrics.jsonl").exists()
    for machine in nodes:
        machine.kill_service(SERVICE)
    for worker in workers:
        worker.wait(DEADLINE_S)
    workers = pods.start_workers([secret, secret])
    finish([pods.start_launcher(secret)])
    assert_trained(cluster, "mpijob", one_process[:STEPS], world_size=4)
    assert [worker.poll() for worker in workers] == [None, None]
