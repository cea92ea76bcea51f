"""The operator's key, and the nodes' ssh_config and known_hosts."""

from __future__ import annotations

import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from payload.core.errors import ConfigError
from payload.machines.inventory import Access, ClusterInventory, Node
from payload.orchestrate.clouds.cluster_records import cluster_folder
from payload.orchestrate.findings.trial import record_path
from payload.orchestrate.ssh.cluster import operator_key
from payload.orchestrate.ssh.ssh_config import render_known_hosts, render_ssh_config
from payload.stack.cluster_identity import resolve_cluster_identity
from payload.stack.operator_key_file import make_operator_key, operator_key_path
from tests.support.golden_files import assert_golden


def make_cluster(*, kind: str = "direct") -> ClusterInventory:
    nodes = tuple(
        Node(
            name=f"node-{i}",
            address=f"10.0.0.{i + 2}",
            external_address="203.0.113.7" if i == 0 and kind == "direct" else None,
            ssh_port=2222 if i == 1 else 22,
            host_keys=(f"ssh-ed25519 AAAA{i}", f"ecdsa-sha2-nistp256 AAAB{i}"),
            zone="us-central1-a",
            physical_cores=4,
            memory_gib=32,
        )
        for i in range(2)
    )
    access = Access(kind="iap", project="pro") if kind == "iap" else Access(kind="direct")
    return ClusterInventory(
        cluster="c", source="file", ssh_user="trainer", access=access, bucket=None, nodes=nodes
    )


def config_of(inventory: ClusterInventory, *, on_head: bool, folder: str = "/x y/.cluster") -> str:
    home = PurePosixPath(folder)
    return render_ssh_config(
        inventory.nodes,
        user=inventory.ssh_user,
        access=inventory.access,
        key=home / "id_ed25519",
        known_hosts=home / "known_hosts",
        on_head=on_head,
    )


def test_known_hosts_has_every_key_under_its_node_s_name() -> None:
    assert_golden("known_hosts.2", render_known_hosts(make_cluster().nodes))


@pytest.mark.parametrize(
    ("name", "kind", "on_head"),
    [("head", "direct", True), ("operator", "direct", False), ("iap", "iap", False)],
)
def test_the_ssh_config_checks_host_keys(name: str, kind: str, on_head: bool) -> None:
    text = config_of(make_cluster(kind=kind), on_head=on_head)
    assert_golden(f"ssh_config.{name}", text)
    assert "StrictHostKeyChecking yes" in text


@pytest.mark.parametrize("folder", ['/a"b', "/a\nProxyCommand x", "/$HOME", "/a\\b"])
def test_a_path_that_ssh_would_read_otherwise_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="ssh_config does not allow all of its characters"):
        config_of(make_cluster(), on_head=True, folder=folder)


def test_iap_needs_project_and_zone() -> None:
    cluster = make_cluster(kind="iap")
    with pytest.raises(ConfigError, match=r"needs access\.project"):
        config_of(replace(cluster, access=Access(kind="iap")), on_head=False)
    nodes = (replace(cluster.nodes[0], zone=None), cluster.nodes[1])
    with pytest.raises(ConfigError, match="needs the zone of node-0"):
        config_of(replace(cluster, nodes=nodes), on_head=False)


def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = operator_key_path(tmp_path, cluster="mine")
    with ThreadPoolExecutor(8) as pool:
        publics = set(pool.map(lambda _: make_operator_key(path), range(8)))
    assert publics == {make_operator_key(path)}
    assert path.relative_to(tmp_path) == Path(".cluster/mine/id_ed25519")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [found.name for found in path.parent.iterdir()] == ["id_ed25519"]


@pytest.mark.sshd
def test_the_public_half_is_what_openssh_finds(tmp_path: Path) -> None:
    path = tmp_path / "c" / "id_ed25519"
    public = make_operator_key(path)
    found = subprocess.run(
        ["ssh-keygen", "-y", "-f", str(path)], capture_output=True, text=True, check=True
    )
    assert public.split()[:2] == found.stdout.split()[:2]
    assert public.split()[2] == "tileforge-operator:c"


def test_the_public_half_of_a_key_with_a_passphrase_is_read_without_it(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    locked = serialization.PrivateFormat.OpenSSH.encryption_builder().kdf_rounds(1).build(b"secret")
    path = tmp_path / "c" / "id_ed25519"
    path.parent.mkdir()
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, locked)
    )
    path.chmod(0o600)
    wanted = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    assert make_operator_key(path) == f"{wanted.decode()} tileforge-operator:c"
    content = path.read_bytes()
    for damaged in (content[:90] + b"\n-----END", content.replace(b"AAAA", b"////")):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="Restore the key, or move the file away"):
            make_operator_key(path)


def test_a_key_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "c" / "id_ed25519"
    make_operator_key(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"is readable by others \(mode 644\)"):
        make_operator_key(path)


@pytest.mark.parametrize("is_theirs", [True, False])
def test_a_key_that_came_with_the_folder_opens_no_connection(
    is_theirs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inventory = make_cluster()
    path = operator_key_path(tmp_path, cluster=inventory.cluster)
    make_operator_key(path)
    if is_theirs:
        monkeypatch.setattr("os.getuid", lambda: 12345)
    else:
        path.chmod(0o644)
    with pytest.raises(ConfigError, match="that you own" if is_theirs else "is readable by others"):
        operator_key(inventory, given=None)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    path.chmod(0o600)
    assert operator_key(inventory, given=None) == path


def test_a_key_that_is_none_is_said_to(tmp_path: Path) -> None:
    path = tmp_path / "id_ed25519"
    path.touch(mode=0o600)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_operator_key(path)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("place", [".cluster", ".cluster/c", ".cluster/c/id_ed25519"])
def test_files_of_a_cluster_are_not_written_through_a_link_in_the_project_s_folder(
    place: str, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, project = tmp_path / "home" / ".ssh", tmp_path / "cloned"
    for folder in (private, private / "c"):
        folder.mkdir(parents=True)
        (folder / "known_hosts").write_text("mine")
        (folder / "id_ed25519").write_text("mine")
    link = project / place
    link.parent.mkdir(parents=True)
    link.symlink_to(private / "id_ed25519" if place.endswith("19") else private)
    monkeypatch.chdir(project)
    inventory, before = make_cluster(), sorted(private.rglob("*"))
    with pytest.raises(ConfigError, match=f"{place} is a symlink"):
        operator_key(inventory, given=tmp_path / "key" if given else None)
    if not place.endswith("19"):
        with pytest.raises(ConfigError, match="is a symlink"):
            cluster_folder(project, "c")
        with pytest.raises(ConfigError, match="is a symlink"):
            resolve_cluster_identity(project, "c")
        with pytest.raises(ConfigError, match="is a symlink"):
            record_path(project, cluster="c")
    assert sorted(private.rglob("*")) == before
    assert {path.read_text() for path in before if path.is_file()} == {"mine"}
