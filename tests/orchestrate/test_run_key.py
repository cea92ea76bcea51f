"""The run's key: created on the head, authorized on the nodes, and revoked afterwards."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import stat
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath
from subprocess import CompletedProcess
from typing import Any

import pytest

from payload.core.errors import (
    ConfigError,
    ConnectionLostError,
    ExitCode,
    NodesError,
    PreflightError,
)
from payload.launch.environment import launcher_environment
from payload.launch.launcher import Reach
from payload.launch.launcher_files import render_hosts
from payload.launch.launchers.registry import find
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.ssh import run_keys, start_claim
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.remote_calls import Completed, Login, ask, parse_answer
from payload.orchestrate.ssh.run_keys import (
    RunKey,
    install_run_key,
    remove_run_key,
    remove_stale_keys,
)
from payload.orchestrate.ssh.start_claim import Claim, HeadBusyError, claimed
from tests.orchestrate.conftest import PATIENT, StartSshd
from tests.orchestrate.sshd import Sshd, make_cluster, make_key
from tests.support.launching import BIN
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.sshd

NAME, OTHER = "run-1.0a1b2c3d", "run-11.0a1b2c3d"


@pytest.fixture
def nodes(start_sshd: StartSshd) -> list[Sshd]:
    return [start_sshd(f"node-{i}", f"127.0.0.{i + 2}") for i in range(2)]


def cluster_of(inventory: ClusterInventory, login: Login) -> Cluster:
    return Cluster(inventory, login=login, env={}, deadlines=PATIENT)


def ssh_from_head(key: RunKey, node: Node, argv: Sequence[str]) -> CompletedProcess[str]:
    """Run ssh to a node as mpirun on the head does."""
    return subprocess.run(
        ["ssh", "-F", str(key.config), node.address, *argv],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_the_head_reaches_every_node_until_the_key_is_removed(
    nodes: list[Sshd], login: Login
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    before = [sshd.authorized_keys.read_text(encoding="ascii") for sshd in nodes]
    with cluster_of(inventory, login) as cluster:
        key = install_run_key(cluster, name=NAME, lasts_s=600)
        for sshd in nodes:
            done = ssh_from_head(key, sshd.node, ["echo", "$HOME"])
            assert done.stdout.strip() == str(sshd.home), done.stderr
        remove_run_key(cluster, NAME)
        remove_run_key(cluster, NAME)
    assert [sshd.authorized_keys.read_text(encoding="ascii") for sshd in nodes] == before
    assert not Path(key.folder).exists()


def test_the_private_half_stays_on_the_head_for_its_owner_alone(
    nodes: list[Sshd], login: Login
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        key = Path(install_run_key(cluster, name=NAME, lasts_s=600).folder)
    assert key.is_relative_to(nodes[0].home / ".ssh")
    assert stat.S_IMODE(key.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in key.iterdir()}
    assert modes.pop("id_ed25519.pub") == 0o644
    assert modes == {"id_ed25519": 0o600, "known_hosts": 0o600, "ssh_config": 0o600}
    there = {path.name for path in (nodes[1].home / ".ssh").iterdir()}
    assert there == {"authorized_keys", ".tileforge.lock"}
    line = nodes[1].authorized_keys.read_text(encoding="ascii").splitlines()[-1]
    assert re.fullmatch(
        r'restrict,from="127\.0\.0\.1,127\.0\.0\.2",expiry-time="\d{14}" '
        rf"ssh-ed25519 \S+ tileforge-run:{re.escape(NAME)}",
        line,
    )
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
        key = install_run_key(cluster, name=NAME, lasts_s=600)
    private = [Path(key.folder) / "id_ed25519", login.key]
    lines = [line for path in private for line in path.read_text().splitlines()[1:-1]]
    assert len(lines) > 8 and len(seen) > 4
    assert not [line for line in lines if line in "".join(seen)]


def test_removing_one_run_s_key_leaves_the_others(nodes: list[Sshd], login: Login) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        install_run_key(cluster, name=NAME, lasts_s=600)
        kept = install_run_key(cluster, name=OTHER, lasts_s=600)
        install_run_key(cluster, name=OTHER, lasts_s=600)
        remove_run_key(cluster, NAME)
        assert ssh_from_head(kept, nodes[1].node, ["true"]).returncode == 0
    text = nodes[1].authorized_keys.read_text(encoding="ascii")
    assert f"tileforge-run:{NAME}\n" not in text
    assert text.count(f"tileforge-run:{OTHER}\n") == 1


def test_a_key_that_lasts_ends_by_itself_and_the_next_action_clears_it_away(
    nodes: list[Sshd], login: Login
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        lasting = install_run_key(cluster, name="long.00000000", lasts_s=600)
        ended = install_run_key(cluster, name="short.00000000", lasts_s=-1)
        for key, reached in ((lasting, True), (ended, False)):
            done = ssh_from_head(key, nodes[1].node, ["true"])
            assert (done.returncode == 0) is reached, done.stderr
        install_run_key(cluster, name="next.00000000", lasts_s=600)
    for sshd in nodes:
        text = sshd.authorized_keys.read_text(encoding="ascii")
        assert "tileforge-run:long." in text and "tileforge-run:short." not in text
    assert Path(lasting.folder).is_dir() and not Path(ended.folder).exists()


def mpirun(key: RunKey, inventory: ClusterInventory, tmp_path: Path) -> CompletedProcess[str]:
    """Run `echo` on every node with mpirun, as on the head."""
    hosts = tmp_path / "hosts"
    hosts.write_text(render_hosts(inventory.nodes), encoding="ascii")
    reach = Reach(interface="lo", ssh=("-F", str(key.config)))
    settings = find("mpirun").settings(reach)
    number = str(len(inventory.nodes))
    return subprocess.run(
        [str(BIN / "mpirun"), "-f", str(hosts), "-n", number, "-ppn", "1", "echo", "here"],
        env=launcher_environment({**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}, settings),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.ranks
def test_mpirun_starts_ranks_with_the_run_s_key(
    nodes: list[Sshd], login: Login, tmp_path: Path
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        key = install_run_key(cluster, name=NAME, lasts_s=600)
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
        key = install_run_key(cluster, name=NAME, lasts_s=600)
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
            install_run_key(cluster, name=NAME, lasts_s=600)
    assert caught.value.exit_code == ExitCode.SSH_UNREACHABLE


def test_a_worker_that_was_away_forgets_the_key_when_it_is_back(
    nodes: list[Sshd], login: Login
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    before = [sshd.authorized_keys.read_text(encoding="ascii") for sshd in nodes]
    with cluster_of(inventory, login) as cluster:
        key = install_run_key(cluster, name=NAME, lasts_s=600)
        nodes[1].stop()
        with pytest.raises(NodesError, match="node-1"):
            remove_run_key(cluster, NAME)
        assert list(Path(key.folder).iterdir()) == []
    assert trusted(nodes[1]) == [NAME]
    nodes[1].start()
    with cluster_of(inventory, login) as cluster:
        assert remove_stale_keys(cluster) == [NAME]
        assert remove_stale_keys(cluster) == []
    assert [sshd.authorized_keys.read_text(encoding="ascii") for sshd in nodes] == before
    assert not Path(key.folder).exists()


@pytest.mark.parametrize("run_id", ["..", "a b", "a;b", "-x", "a\nb"])
def test_a_run_id_that_is_no_plain_name_is_refused(
    nodes: list[Sshd], login: Login, run_id: str
) -> None:
    inventory = make_cluster(nodes[0].node)
    with cluster_of(inventory, login) as cluster, pytest.raises(ConfigError, match="run id"):
        enter(cluster, run_dir=PurePosixPath(f"{nodes[0].home}/runs/{run_id}"))


def enter(cluster: Cluster, *, run_dir: PurePosixPath) -> Claim:
    """Claim the head without waiting; return the claim."""
    with claimed(cluster, run_dir=run_dir, say=print, timeout_s=0) as claim:
        return claim


def run_dir_on(head: Sshd, run_id: str) -> PurePosixPath:
    return PurePosixPath(head.home, "tileforge", "runs", run_id)


def trusted(sshd: Sshd) -> list[str]:
    """Return the names of run keys that a node authorizes."""
    return re.findall(r"tileforge-run:(\S+)", sshd.authorized_keys.read_text(encoding="ascii"))


def test_two_people_who_resume_one_run_have_one_key_each_and_the_loser_touches_neither(
    nodes: list[Sshd], login: Login
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    run_dir = run_dir_on(nodes[0], "one")
    with cluster_of(inventory, login) as winner, cluster_of(inventory, login) as loser:
        with claimed(winner, run_dir=run_dir, say=print) as claim:
            key = install_run_key(winner, name=claim.name, lasts_s=600)
            with pytest.raises(
                HeadBusyError, match=r"from 127\.0\.0\.1\) is starting one, so noth"
            ):
                enter(loser, run_dir=run_dir)
            # Another operator's cleanup keeps a key whose attempt is live.
            assert remove_stale_keys(loser) == []
            assert [trusted(sshd) for sshd in nodes] == [[claim.name]] * 2
            assert ssh_from_head(key, nodes[1].node, ["true"]).returncode == 0
        later = enter(loser, run_dir=run_dir)
        assert later.running is None and later.name != claim.name


def test_the_head_is_claimed_while_a_supervisor_starts_and_then_has_a_run(
    nodes: list[Sshd], login: Login
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    run_dir = run_dir_on(nodes[0], "one")
    with cluster_of(inventory, login) as cluster:
        name = enter(cluster, run_dir=run_dir).name
        install_run_key(cluster, name=name, lasts_s=600)
        Path(run_dir).mkdir()
        with Path(run_dir, "supervisor.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert enter(cluster, run_dir=run_dir_on(nodes[0], "two")).running == "one"
            assert remove_stale_keys(cluster) == []
        assert remove_stale_keys(cluster) == [name]
    assert not trusted(nodes[0]) and not trusted(nodes[1])
    assert not list((nodes[0].home / ".ssh" / "tileforge").iterdir())


def test_the_key_of_a_run_with_another_head_is_not_removed(nodes: list[Sshd], login: Login) -> None:
    mine = make_cluster(*(sshd.node for sshd in nodes))
    theirs = make_cluster(*(sshd.node for sshd in reversed(nodes)))
    with cluster_of(mine, login) as owner, cluster_of(theirs, login) as other:
        with claimed(owner, run_dir=run_dir_on(nodes[0], "one"), say=print) as claim:
            install_run_key(owner, name=claim.name, lasts_s=600)
        # Every node has the run's files, but only its own head has the supervisor.
        for sshd in nodes:
            Path(run_dir_on(sshd, "one")).mkdir(parents=True)
        with Path(run_dir_on(nodes[0], "one"), "supervisor.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert remove_stale_keys(other) == []
        # The other head cannot know that it has ended.
        assert remove_stale_keys(other) == []
        assert [trusted(sshd) for sshd in nodes] == [[claim.name]] * 2
        assert remove_stale_keys(owner) == [claim.name]


def test_the_claim_of_an_operator_whose_connection_breaks_is_free_again(
    nodes: list[Sshd], login: Login
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    run_dir = run_dir_on(nodes[0], "one")
    with ExitStack() as stack, cluster_of(inventory, login) as other:
        broken = stack.enter_context(cluster_of(inventory, login))
        stack.enter_context(claimed(broken, run_dir=run_dir, say=print))
        broken.connect(inventory.head).close()
        with claimed(other, run_dir=run_dir, say=print, timeout_s=DEADLINE_S) as claim:
            assert claim.running is None


def test_a_claim_that_a_broken_connection_still_holds_ends_as_that_connection_did(
    nodes: list[Sshd], login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_claim, "_RETRY_S", 0.1)
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    lost = ConnectionLostError("node-0: the connection broke")
    said: list[str] = []
    with ExitStack() as stack, cluster_of(inventory, login) as again:
        # A head that has not detected the disconnect still holds the earlier claim.
        before = stack.enter_context(cluster_of(inventory, login))
        claim = partial(claimed, run_dir=run_dir_on(nodes[0], "one"))
        name = stack.enter_context(claim(before, say=print)).name
        retry = partial(claim, again, say=said.append, timeout_s=1, lost=lost)
        with pytest.raises(ConnectionLostError) as caught, retry(name=name):
            pass
        assert caught.value is lost
        # Another operator's claim does not depend on the connection.
        with pytest.raises(HeadBusyError), retry(name=OTHER):
            pass
        before.close()
        with retry(name=name, timeout_s=DEADLINE_S) as claim_again:
            assert claim_again == Claim(name=name, running=None)
    assert said[:2] == [
        "node-0: the broken connection still holds the claim; waiting",
        "node-0: another operator (from 127.0.0.1) is starting one; waiting",
    ]


def test_a_stolen_run_key_opens_no_node_from_elsewhere(nodes: list[Sshd], login: Login) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster:
        key = install_run_key(cluster, name=NAME, lasts_s=600)
    worker = nodes[1].node
    assert ssh_from_head(key, worker, ["true"]).returncode == 0
    argv = ["ssh", "-F", str(key.config), "-b", "127.0.0.9", worker.address, "true"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 255 and "Permission denied" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "answer",
    [
        {"public": f"ssh-ed25519 {'A' * 68} tileforge-run:{NAME}\nssh-ed25519 {'B' * 68} mine"},
        {"public": f"ssh-ed25519 {'A' * 68} mine"},
        {"public": f"ssh-ed25519 {'A' * 68} tileforge-run:{OTHER}"},
        {"folder": "/etc/.ssh"},
        {"folder": f'/x"\nProxyCommand id/.ssh/tileforge/{NAME}'},
        {"folder": None},
    ],
)
def test_a_head_that_answers_with_another_key_than_asked_for_reaches_no_worker(
    nodes: list[Sshd], login: Login, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:

    def lie(connection: Connection, program: str, cls: type[Any], asked: Any, **more: Any) -> Any:
        found = ask(connection, program, cls, asked, **more)
        if asked["action"] != "make":
            return found
        text = json.dumps(asdict(found) | answer).encode()
        return parse_answer(cls, text, node=connection.node.name)

    monkeypatch.setattr(run_keys, "ask", lie)
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with cluster_of(inventory, login) as cluster, pytest.raises(PreflightError, match="node-0: "):
        install_run_key(cluster, name=NAME, lasts_s=600)
    assert not trusted(nodes[1])
    assert len(nodes[1].authorized_keys.read_text(encoding="ascii").splitlines()) == 1
