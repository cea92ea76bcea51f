"""The shared folder of a cluster: its resources, access to it, and the nodes' settings."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pulumi
import pytest

from infra.config import ClusterConfig
from infra.cost import cost_of, describe, price_of_cluster
from infra.gcp.network import NFS_PORT
from infra.node_addresses import FILESTORE_RANGE, SUBNET
from payload.core.errors import BudgetError
from payload.machines.inventory import SHARED_FOLDER
from payload.orchestrate.clouds.gcp.filestore_confirmation import filestore_name
from tests.infra.stacks import FILESTORE, ROOT, Plain, deploy
from tests.infra.test_cloud_init import written_files
from tests.infra.test_monitoring import in_script

SCRIPT = ROOT / "bootstrap" / "shared-storage.sh"
NODES = "c-node-0=10.60.0.10 c-node-1=10.60.0.11"


def settings_of(instance: Plain) -> str:
    """Return a node's bootstrap.conf."""
    written = written_files(str(instance["metadata"]["user-data"]))
    return written["/etc/tileforge/bootstrap.conf"].decode()


def test_without_it_nothing_of_it_is_there(tmp_path: Path) -> None:
    made = deploy({}, folder=tmp_path)
    conf = settings_of(made.of_type("Instance")[0])
    assert "SHARED=none\n" in conf and "NODES=''\n" in conf
    assert not any("shared-storage.sh" in str(i["metadata"]) for i in made.of_type("Instance"))
    assert not any(NFS_PORT in str(rule.get("allows")) for rule in made.of_type("Firewall"))


def test_nfs_opens_one_port_between_the_nodes_alone(tmp_path: Path) -> None:
    made = deploy({"sharedStorage": "nfs"}, folder=tmp_path)
    opened = [r for r in made.of_type("Firewall") if NFS_PORT in str(r.get("allows"))]
    assert sorted(rule["name"] for rule in opened) == ["dev-allow-nodes", "dev-egress-nodes"]
    for rule in opened:
        assert "sourceRanges" not in rule
        assert rule.get("sourceServiceAccounts") or rule["destinationRanges"] == [SUBNET]
    conf = settings_of(made.of_type("Instance")[1])
    assert f"SHARED=nfs\nSHARED_DIR={SHARED_FOLDER}\nSHARED_CLIENTS={SUBNET}\n" in conf
    assert "NODES='dev-node-0=10.60.0.10 dev-node-1=10.60.0.11 dev-node-2=10.60.0.12'" in conf


def test_filestore_is_for_the_nodes_alone_and_goes_with_the_stack(tmp_path: Path) -> None:
    made = deploy({"sharedStorage": "filestore", "maxHourlyUsd": "none"}, folder=tmp_path)
    (found,) = [each for each in made.resources if each["type"] == FILESTORE]
    inputs = found["inputs"]
    assert inputs["fileShares"]["nfsExportOptions"] == [
        {"accessMode": "READ_WRITE", "squashMode": "NO_ROOT_SQUASH", "ipRanges": ["10.60.0.10"]},
        {
            "accessMode": "READ_WRITE",
            "squashMode": "ROOT_SQUASH",
            "ipRanges": ["10.60.0.11", "10.60.0.12"],
        },
    ]
    assert inputs["deletionProtectionEnabled"] is False
    assert inputs["name"] == filestore_name("dev")
    assert not found["options"].get("retainOnDelete")
    (egress,) = [r for r in made.of_type("Firewall") if r["name"] == "dev-egress-filestore"]
    assert egress["destinationRanges"] == [FILESTORE_RANGE]
    assert egress["allows"] == [{"protocol": "tcp", "ports": [NFS_PORT]}]
    assert {i["metadata"]["shared-source"] for i in made.of_type("Instance")} == {
        "10.60.1.2:/shared"
    }


def test_filestore_costs_256_dollars_a_month_beside_the_machines() -> None:
    config = ClusterConfig(cluster="c", max_hourly_usd="none")
    shared = replace(config, shared_storage="filestore")
    plain, cost = cost_of(config), cost_of(shared)
    assert cost.hourly_usd is not None and plain.hourly_usd is not None
    assert (cost.hourly_usd - plain.hourly_usd) * 730 == pytest.approx(256, abs=0.01)
    text = describe(shared, cost, speed=None)
    assert "$0.3507 of this is for Filestore (1024 GiB)" in text
    assert "is for Filestore" not in describe(config, plain, speed=None)


def test_where_filestore_has_no_known_price_a_cap_refuses_it_by_name() -> None:
    config = ClusterConfig(
        cluster="c",
        shared_storage="filestore",
        region="europe-west4",
        zones=("europe-west4-a",),
    )
    assert cost_of(config).unknown == ("Filestore (1024 GiB) in europe-west4",)
    with pytest.raises(BudgetError, match=r"because the price of Filestore \(1024 GiB\)"):
        price_of_cluster(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharedStorage": "smb"}, "Use one of: none, nfs, filestore"),
        ({"sharedStorage": "filestore", "filestoreGb": 100}, "1024 to 9984 GiB in steps of 256"),
        ({"sharedStorage": "filestore", "filestoreGb": 1025}, "1024 to 9984 GiB in steps of 256"),
    ],
)
def test_wrong_settings_are_refused_with_the_fix(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(pulumi.RunError, match=message):
        deploy({**settings, "maxHourlyUsd": "none"}, folder=tmp_path)


STEPS = """\
say() { :; }; pause_apt_jobs() { :; }; resume_apt_jobs() { :; }; update_lists() { :; }
package() { echo package $1; }; bash() { shift; echo script "$@"; }; grep() { return 0; }
attribute() { echo 10.60.1.2:/shared; }; has_package() { return 1; }
SHARED_DIR=/srv/tileforge/shared; SHARED_CLIENTS=10.60.0.0/24
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "address", "does"),
    [
        ("none", "10.60.0.10", []),
        (
            "nfs",
            "10.60.0.10",
            ["package nfs-common", "package nfs-kernel-server", "script export 10.60.0.0/24"],
        ),
        ("nfs", "10.60.0.11", ["package nfs-common", "script mount 10.60.0.10:/"]),
        (
            "filestore",
            "10.60.0.10",
            ["package nfs-common", "script mount 10.60.1.2:/shared", "script folders"],
        ),
        ("filestore", "10.60.0.11", ["package nfs-common", "script mount 10.60.1.2:/shared"]),
    ],
)
def test_a_node_exports_or_mounts_by_its_place(kind: str, address: str, does: list[str]) -> None:
    hostname = f'hostname() {{ echo "{address} "; }}'
    found = in_script(f'{STEPS}{hostname}; SHARED={kind}; NODES="{NODES}"; step_shared')
    assert found.splitlines() == does


@pytest.mark.processes
def test_the_export_is_for_one_range_and_roots_of_others_are_nobody(tmp_path: Path) -> None:
    called = tmp_path / "called"
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f'#!/bin/sh\necho "$@" >>{called}\n', encoding="ascii")
    systemctl.chmod(0o755)
    subprocess.run(
        ["bash", SCRIPT, "export", SUBNET],
        env={"PATH": f"{systemctl.parent}:/usr/sbin:/usr/bin:/bin", "SHARED_ROOT": str(tmp_path)},
        check=True,
    )
    exports = (tmp_path / "etc/exports.d/tileforge.exports").read_text(encoding="ascii")
    assert exports == f"{SHARED_FOLDER} {SUBNET}(rw,sync,root_squash,no_subtree_check,fsid=0)\n"
    assert "vers3=n" in (tmp_path / "etc/nfs.conf.d/tileforge.conf").read_text(encoding="ascii")
    shared = tmp_path / SHARED_FOLDER.lstrip("/")
    assert {path.name: path.stat().st_mode & 0o7777 for path in shared.iterdir()} == {
        name: 0o1777 for name in ("data", "models", "hub")
    }
    assert called.read_text(encoding="ascii").splitlines()[-1] == "restart nfs-server.service"
