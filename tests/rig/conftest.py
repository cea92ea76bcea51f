"""Skips the tests that boot machines where this is impossible, and has fixtures for the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.launch.exports.base import MOUNT
from payload.orchestrate.node.look import numa_domains, physical_cores
from payload.run_record.run_files import RunPaths
from payload.stack.operator_key_file import make_operator_key, operator_key_path
from tests.launch.exports.jobs import DATA
from tests.orchestrate.operator import Operator
from tests.rig import prepared
from tests.rig.host import missing
from tests.rig.leftovers import CANARIES
from tests.rig.machine import Machine
from tests.rig.prepared import node_user_data
from tests.rig.rig import Rig
from tests.rig.slurm_cluster import SHARED, SlurmCluster, slurm_cluster
from tests.rig.wheelhouse import WHEELHOUSE_ON_MACHINE
from tests.support.data_folders import make_data_folder
from tests.support.launching import TINY_RUN, losses, train
from tests.support.left_out import leave_out


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that boot machines if no machine can be booted."""
    problem = missing()
    if problem:
        rig = [item for item in items if item.get_closest_marker("rig")]
        leave_out(config, items, rig, folder="tests/rig", why=f"that boot machines: {problem}.")


@pytest.fixture(scope="session")
def operator_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the operator's folder, with the key of cluster `rig`, the inventory and the runs."""
    return tmp_path_factory.mktemp("operator")


@pytest.fixture(scope="session")
def operator_key(operator_folder: Path) -> Path:
    """Return a private key made by the program; the public key is next to it."""
    path = operator_key_path(operator_folder, cluster="rig")
    public = make_operator_key(path)
    path.with_suffix(".pub").write_text(public + "\n", encoding="ascii")
    return path


@pytest.fixture(scope="session")
def from_nothing(operator_key: Path) -> Iterator[Rig]:
    """Yield four machines that boot for the first time from the unprepared image.

    The first three become ready: two with the default stack's user-data, node-2 from a wheelhouse
    without a package index. node-3 requests a package that does not exist. Tests must not change
    the machines.
    """
    public = operator_key.with_suffix(".pub").read_text(encoding="ascii")
    default = node_user_data(public)
    wheels = node_user_data(public, wheelhouse=WHEELHOUSE_ON_MACHINE)
    broken = node_user_data(public, extra_packages=("no-such-package",))
    with Rig([default, default, wheels, broken], without_index=[2]) as rig:
        states = rig.wait_for_bootstrap(timeout_s=900)
        if states["node-1"]["ok"]:
            prepared.keep(rig.machines[1])
        yield rig


@pytest.fixture(scope="session")
def machines(from_nothing: Rig) -> list[Machine]:
    """Return the head and two workers, which only their bootstrap has prepared."""
    return from_nothing.machines[:3]


@pytest.fixture(scope="session")
def operator(from_nothing: Rig, operator_folder: Path, operator_key: Path) -> Operator:
    """Return an operator with the cluster's key, and with tokens in the environment."""
    found = from_nothing.inventory(physical_cores=physical_cores() or 1)
    nodes = tuple(replace(node, numa_domains=numa_domains() or 1) for node in found.nodes[:3])
    return Operator(
        operator_folder,
        replace(found, cluster="rig", nodes=nodes),
        around=from_nothing.operator_argv,
        secrets=CANARIES,
    )


@pytest.fixture(scope="session")
def trained_by_mpirun(operator: Operator, machines: list[Machine]) -> RunPaths:
    """Return a run of `FEW_STEPS` steps by mpirun on the three machines."""
    code, output = operator.do(*operator.run_words("far", f"train.steps={FEW_STEPS}"))
    assert code == ExitCode.OK and "3 node(s) through mpirun" in output, output
    return operator.paths("far")


FEW_STEPS, TINY_STEPS = 6, 40


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Yield three machines with Slurm and other engines' storage, and a run of `TINY_RUN`."""
    folder = tmp_path_factory.mktemp("shared")
    storage = folder / "storage"
    for each in (storage, storage / "runs"):
        each.mkdir()
        each.chmod(0o777)
    make_data_folder(storage / DATA, num_train_tokens=4000, num_val_tokens=200, vocab_size=512)
    text = TINY_RUN.format(data=f"{SHARED}/storage/{DATA}")
    (folder / "run.toml").write_text(text, encoding="utf-8")
    with slurm_cluster(folder, shared={storage: MOUNT}) as made:
        yield made


@pytest.fixture(scope="session")
def one_process(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of `TINY_STEPS` steps of that run in one process on this host."""
    folder = tmp_path_factory.mktemp("one")
    config, data = folder / "run.toml", cluster.folder / "storage" / DATA
    config.write_text(TINY_RUN.format(data=data), encoding="utf-8")
    train(folder / "run", config, f"train.steps={TINY_STEPS}", "train.checkpoint_every=0")
    return losses(folder / "run")
