"""Nodes for tests over SSH; skips and lists these tests if no sshd can be started."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePosixPath
from shutil import which

import pytest

from payload.machines.inventory import ClusterInventory
from payload.orchestrate.runs.remote_run import RemoteRun
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.remote_calls import Deadlines, Login
from payload.run_record.run_files import RunPaths
from tests.orchestrate.hostile import command_of
from tests.orchestrate.run_copies import write_ranks
from tests.orchestrate.sshd import SSHD, USER, Sshd, logs_since, make_cluster, make_key
from tests.support import cgroup
from tests.support.cgroup import ControlGroup
from tests.support.left_out import leave_out

StartSshd = Callable[..., Sshd]
PATIENT = Deadlines(connect_s=60.0, handshake_s=60.0, auth_s=60.0)
"""For nodes that answer, however busy the machine is."""
SILENT_LATER = replace(PATIENT, connect_s=3.0)
"""For nodes that stop answering after a login."""


def remote_run(
    paths: RunPaths, inventory: ClusterInventory, *, there: Path, login: Login
) -> RemoteRun:
    """Return a run of these nodes, whose folder on the head is `there`."""
    return RemoteRun(
        paths,
        inventory,
        run_dir=PurePosixPath(there),
        key=login.key,
        connect=lambda: Cluster(inventory, login=login, env={}, deadlines=PATIENT),
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that start an sshd on machines without one."""
    # On other systems the loopback interface has one address only.
    if not (sys.platform == "linux" and SSHD.exists() and which("ssh-keygen")):
        leave_out(
            config,
            items,
            [item for item in items if item.get_closest_marker("sshd")],
            folder="tests/orchestrate",
            why=f"that start an SSH server: they need Linux with {SSHD} and ssh-keygen (apt-get "
            "install openssh-server openssh-client).",
        )
    problem = cgroup.problem()
    if problem is not None:
        leave_out(
            config,
            items,
            [item for item in items if "control_group" in getattr(item, "fixturenames", ())],
            folder="tests/orchestrate/test_cgroups.py",
            why=f"within limits of control groups: {problem}.",
        )


@pytest.fixture
def control_group() -> ControlGroup:
    """Makes a control group with limits; tests with it are skipped where that is impossible."""
    return cgroup.control_group


_BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note when the test began."""
    item.stash[_BEGAN] = time.time() - 1.0  # a file's time may be a tick behind


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the nodes' sshds logged where a test fails, as why a connection ended."""
    report = yield
    if report.failed and _BEGAN in item.stash:
        shown = logs_since(item.stash[_BEGAN])
        report.sections += [(f"sshd log of {name}", text) for name, text in shown]
    return report


@pytest.fixture(scope="session")
def login(tmp_path_factory: pytest.TempPathFactory) -> Login:
    """The operator's key, made for the session."""
    key = tmp_path_factory.mktemp("operator") / "id_ed25519"
    make_key(key)
    return Login(user=USER, key=key)


@pytest.fixture
def start_sshd(tmp_path: Path, login: Login) -> Iterator[StartSshd]:
    """Starts a node: start_sshd("node-0", "127.0.0.2"); all are stopped at the end."""
    public_key = login.key.with_suffix(".pub").read_text(encoding="ascii").strip()
    with ExitStack() as stack:

        def start(name: str, address: str, *, public_key: str = public_key, more: str = "") -> Sshd:
            node = Sshd(tmp_path, name=name, address=address, public_key=public_key, more=more)
            return stack.enter_context(node)

        yield start


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, login: Login) -> Iterator[Sshd]:
    """One node that the tests of a module share and leave as it is."""
    public_key = login.key.with_suffix(".pub").read_text(encoding="ascii").strip()
    folder = tmp_path_factory.mktemp("nodes")
    with Sshd(folder, name="node-0", address="127.0.0.2", public_key=public_key) as sshd:
        yield sshd


@pytest.fixture
def head(start_sshd: StartSshd, tmp_path: Path) -> Sshd:
    """A node that returns the false answers that a test has written (`hostile.lie`)."""
    return start_sshd("node-0", "127.0.0.2", more=command_of(tmp_path))


@pytest.fixture
def inventory(head: Sshd) -> ClusterInventory:
    return make_cluster(head.node)


@pytest.fixture
def cluster(inventory: ClusterInventory, login: Login) -> Iterator[Cluster]:
    with Cluster(inventory, login=login, env={}, deadlines=PATIENT) as cluster:
        yield cluster


@pytest.fixture
def run(
    head: Sshd, inventory: ClusterInventory, login: Login, tmp_path: Path
) -> Iterator[RemoteRun]:
    """A run with one rank on the head and one on a worker that is never contacted."""
    there = head.home / "tileforge" / "runs" / "one"
    there.mkdir(parents=True)
    paths = RunPaths(tmp_path / "operator" / "runs" / "one")
    write_ranks(paths, "node-0", "node-1")
    run = remote_run(paths, inventory, there=there, login=login)
    yield run
    run.close()
