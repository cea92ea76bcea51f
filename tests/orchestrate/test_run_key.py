"""The run's key: made on the head, trusted by the nodes, gone afterwards."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from payload.errors import ConfigError, ExitCode, NodesError
from payload.inventory import ClusterInventory, Node
from payload.launch.environment import cluster_mpirun_environment, launcher_environment
from payload.launch.files import render_hosts
from payload.orchestrate.cluster import Cluster
from payload.orchestrate.run_key import RunKey, install_run_key, remove_run_key
from payload.orchestrate.ssh import Connection
from payload.orchestrate.ssh_settings import Completed, Login
from tests.launching import BIN
from tests.orchestrate.conftest import SHORT, StartSshd
from tests.orchestrate.sshd import Sshd, make_cluster, make_key

pytestmark = pytest.mark.sshd


@pytest.fixture
def nodes(start_sshd: StartSshd) -> list[Sshd]:
    return [start_sshd(f"node-{i}", f"127.0.0.{i + 2}") for i in range(2)]


def cluster_of(inventory: ClusterInventory, login: Login) -> Cluster:
    return Cluster(inventory, login=login, env={}, deadlines=SHORT)


def ssh_from_head(key: RunKey, node: Node, argv: Sequence[str]) -> CompletedProcess[str]:
    """What mpirun on the head does to reach a node."""
    return subprocess.run(
        ["ssh", "-F", str(key.config), node.address, *argv],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_head_reaches_every_node_until_the_key_is_removed(
    nodes: list[Sshd], login: Login
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    before = [sshd.authorized_keys.read_text(encoding="ascii") for sshd in nodes]
    with cluster_of(inventory, login) as cluster:
        key = install_run_key(cluster, inventory, run_id="run-1")
        for sshd in nodes:
            done = ssh_from_head(key, sshd.node, ["echo", "$HOME"])
            assert done.stdout.strip() == str(sshd.home), done.stderr
        remove_run_key(cluster, inventory, run_id="run-1")
        remove_run_key(cluster, inventory, run_id="run-1")
    assert [sshd.authorized_keys.read_text(encoding="ascii") for sshd in nodes] == before
    assert not Path(key.folder).exists()


def test_the_private_half_stays_on_the_head_for_its_owner_alone(
    nodes: list[Sshd], login: Login
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        key = Path(install_run_key(cluster, inventory, run_id="run-1").folder)
    assert key.is_relative_to(nodes[0].home / ".ssh")
    assert stat.S_IMODE(key.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in key.iterdir()}
    assert modes.pop("id_ed25519.pub") == 0o644
    assert modes == {"id_ed25519": 0o600, "known_hosts": 0o600, "ssh_config": 0o600}
    there = {path.name for path in (nodes[1].home / ".ssh").iterdir()}
    assert there == {"authorized_keys", ".tileforge.lock"}
    line = nodes[1].authorized_keys.read_text(encoding="ascii").splitlines()[-1]
    assert line.startswith("restrict ssh-ed25519 ") and line.endswith(" tileforge-run:run-1")
    assert stat.S_IMODE(nodes[1].authorized_keys.stat().st_mode) == 0o600


def test_no_private_key_travels_or_becomes_an_argument(
    nodes: list[Sshd], login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    run = Connection.run

    def watched(self: Connection, argv: Sequence[str], **options: Any) -> Completed:
        done = run(self, argv, **options)
        seen.append(repr((argv, options, done)))
        return done

    monkeypatch.setattr(Connection, "run", watched)
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        key = install_run_key(cluster, inventory, run_id="run-1")
    private = [Path(key.folder) / "id_ed25519", login.key]
    lines = [line for path in private for line in path.read_text().splitlines()[1:-1]]
    assert len(lines) > 8 and len(seen) > 4
    assert not [line for line in lines if line in "".join(seen)]


def test_removing_one_run_s_key_leaves_the_others(nodes: list[Sshd], login: Login) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        install_run_key(cluster, inventory, run_id="run-1")
        kept = install_run_key(cluster, inventory, run_id="run-11")
        install_run_key(cluster, inventory, run_id="run-11")
        remove_run_key(cluster, inventory, run_id="run-1")
        assert ssh_from_head(kept, nodes[1].node, ["true"]).returncode == 0
    text = nodes[1].authorized_keys.read_text(encoding="ascii")
    assert "tileforge-run:run-1\n" not in text
    assert text.count("tileforge-run:run-11\n") == 1


def test_a_key_that_lasts_ends_by_itself_and_the_next_action_clears_it_away(
    nodes: list[Sshd], login: Login
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        lasting = install_run_key(cluster, inventory, run_id="long", lasts_s=600)
        ended = install_run_key(cluster, inventory, run_id="short", lasts_s=-1)
        for key, reached in ((lasting, True), (ended, False)):
            done = ssh_from_head(key, nodes[1].node, ["true"])
            assert (done.returncode == 0) is reached, done.stderr
        install_run_key(cluster, inventory, run_id="next")
    for sshd in nodes:
        text = sshd.authorized_keys.read_text(encoding="ascii")
        assert "tileforge-run:long\n" in text and "tileforge-run:short\n" not in text
    assert Path(lasting.folder).is_dir() and not Path(ended.folder).exists()


def mpirun(key: RunKey, inventory: ClusterInventory, tmp_path: Path) -> CompletedProcess[str]:
    """`echo` on every node, started by mpirun as on the head."""
    hosts = tmp_path / "hosts"
    hosts.write_text(render_hosts(inventory), encoding="ascii")
    settings = cluster_mpirun_environment("lo", ssh_config=str(key.config))
    number = str(len(inventory.nodes))
    return subprocess.run(
        [str(BIN / "mpirun"), "-f", str(hosts), "-n", number, "-ppn", "1", "echo", "here"],
        env=launcher_environment({**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}, settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.ranks
def test_mpirun_starts_ranks_with_the_run_s_key(
    nodes: list[Sshd], login: Login, tmp_path: Path
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        key = install_run_key(cluster, inventory, run_id="run-1")
    done = mpirun(key, inventory, tmp_path)
    assert done.stdout == "here\nhere\n", done.stderr
    public = (Path(key.folder) / "id_ed25519.pub").read_text(encoding="ascii").split()[1]
    digest = hashlib.sha256(base64.b64decode(public)).digest()
    assert base64.b64encode(digest).decode().rstrip("=") in nodes[1].log.read_text("utf-8")


def test_mpirun_s_ssh_refuses_another_host_key(
    nodes: list[Sshd], login: Login, tmp_path: Path
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        key = install_run_key(cluster, inventory, run_id="run-1")
    known_hosts = Path(key.folder) / "known_hosts"
    lines = known_hosts.read_text(encoding="ascii").splitlines()
    lines[1] = f"node-1 {make_key(tmp_path / 'other')}"
    known_hosts.write_text("\n".join(lines) + "\n", encoding="ascii")
    done = ssh_from_head(key, nodes[1].node, ["touch", str(tmp_path / "reached")])
    assert done.returncode == 255 and "Host key verification failed" in done.stderr
    assert not (tmp_path / "reached").exists()


def test_a_node_that_does_not_take_the_key_is_named(nodes: list[Sshd], login: Login) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        cluster.connect(inventory.nodes[1])
        nodes[1].stop()
        with pytest.raises(NodesError, match=r"failed on 1 node\(s\):\n  node-1: ") as caught:
            install_run_key(cluster, inventory, run_id="run-1")
    assert caught.value.exit_code == ExitCode.SSH_UNREACHABLE


@pytest.mark.parametrize("run_id", ["", "../x", "a b", "a;b", "-x", "a\nb"])
def test_a_run_id_that_is_no_plain_name_is_refused(
    nodes: list[Sshd], login: Login, run_id: str
) -> None:
    inventory = make_cluster(nodes[0].node)
    with cluster_of(inventory, login) as cluster, pytest.raises(ConfigError, match="run id"):
        install_run_key(cluster, inventory, run_id=run_id)
