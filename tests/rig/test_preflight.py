"""`preflight` and the run's key on booted machines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.launch.launcher import Reach
from payload.launch.launcher_files import render_hosts
from payload.launch.launchers.registry import find
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.node.look import numa_domains, physical_cores
from payload.orchestrate.preflight.checks import check_cluster
from payload.orchestrate.preflight.report import Report
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.files import put
from payload.orchestrate.ssh.remote_calls import Deadlines, Login
from payload.orchestrate.ssh.run_keys import install_run_key, remove_run_key
from tests.rig import prepared
from tests.rig.prepared import FILES, node_user_data
from tests.rig.rig import Rig
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.rig, pytest.mark.timeout(1800)]

VENV = "/opt/tileforge/venv/bin"


@pytest.fixture(scope="module")
def rig(operator_key: Path) -> Iterator[Rig]:
    """Yield machines; node-2 requests a package that does not exist, the others become ready."""
    key = operator_key.with_suffix(".pub").read_text(encoding="utf-8")
    good, broken = node_user_data(key), node_user_data(key, extra_packages=("no-such-package",))
    with Rig([good, good, broken], layers=[prepared.layer()]) as rig:
        rig.wait_for_bootstrap(timeout_s=DEADLINE_S)
        yield rig


@pytest.fixture
def login(operator_key: Path) -> Login:
    return Login(user="trainer", key=operator_key)


def inventory_of(rig: Rig, *, num_nodes: int) -> ClusterInventory:
    """Return the operator of the unchanged first machines."""
    inventory = rig.inventory(physical_cores=physical_cores() or 1)
    nodes = tuple(replace(node, numa_domains=numa_domains() or 1) for node in inventory.nodes)
    return replace(inventory, nodes=nodes[:num_nodes])


def check(rig: Rig, inventory: ClusterInventory, login: Login) -> Report:
    deadlines = Deadlines(connect_s=3, handshake_s=3, auth_s=3)
    with (
        rig.joined(),
        Cluster(inventory, login=login, env=os.environ, deadlines=deadlines) as cluster,
    ):
        return check_cluster(inventory, cluster, lock_sha=FILES.lock_sha())


def errors(report: Report) -> dict[str, str]:
    return {f.node: f.line() for f in report.findings if f.severity == "error"}


def test_two_machines_that_are_ready_pass_every_check(rig: Rig, login: Login) -> None:
    report = check(rig, inventory_of(rig, num_nodes=2), login)
    assert errors(report) == {}
    assert {facts.interface for facts in report.facts.values()} == {"ens4"}


def test_a_failed_bootstrap_is_30_with_its_step_and_the_end_of_its_log(
    rig: Rig, login: Login
) -> None:
    report = check(rig, inventory_of(rig, num_nodes=3), login)
    assert report.exit_code == ExitCode.BOOTSTRAP
    (line,) = errors(report).values()
    assert line.startswith("node-2: bootstrap failed in step 'packages': E: Unable to locate")
    assert any("no-such-package" in line for line in report.lines() if line.startswith("  | "))


def test_another_machine_s_host_key_is_22(rig: Rig, login: Login) -> None:
    inventory = inventory_of(rig, num_nodes=2)
    impostor = replace(inventory.nodes[1], host_keys=inventory.nodes[0].host_keys)
    report = check(rig, replace(inventory, nodes=(inventory.nodes[0], impostor)), login)
    assert report.exit_code == ExitCode.HOST_KEY
    assert list(errors(report)) == ["node-1"]


def test_a_key_that_no_machine_knows_is_21(rig: Rig, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    report = check(rig, inventory_of(rig, num_nodes=1), Login(user="trainer", key=key))
    assert report.exit_code == ExitCode.SSH_AUTH


def test_an_sshd_that_is_down_is_20(rig: Rig, login: Login) -> None:
    machine = rig.machines[1]
    machine.exec(["systemctl", "stop", "ssh.service"])
    try:
        report = check(rig, inventory_of(rig, num_nodes=2), login)
    finally:
        machine.exec(["systemctl", "start", "ssh.service"])
    assert report.exit_code == ExitCode.SSH_UNREACHABLE
    assert list(errors(report)) == ["node-1"]


def test_a_machine_that_hangs_is_20(rig: Rig, login: Login) -> None:
    rig.machines[1].freeze()
    try:
        report = check(rig, inventory_of(rig, num_nodes=2), login)
    finally:
        rig.machines[1].thaw()
    assert report.exit_code == ExitCode.SSH_UNREACHABLE
    assert list(errors(report)) == ["node-1"]


def test_two_workers_that_are_cut_from_each_other_are_a_pair(rig: Rig, login: Login) -> None:
    rig.machines[1].cut_from(rig.machines[2])
    try:
        report = check(rig, inventory_of(rig, num_nodes=3), login)
    finally:
        rig.machines[1].restore_to(rig.machines[2])
    pairs = [f.line() for f in report.findings if (f.check, f.severity) == ("ports", "error")]
    assert any(line.startswith("node-1: cannot reach node-2 (10.77.0.13)") for line in pairs)
    assert not [line for line in pairs if "node-0" in line]


def test_a_link_that_swallows_large_packets_is_found_with_the_size_that_works(
    rig: Rig, login: Login
) -> None:
    cable = ["ip", "-n", rig.name, "link", "set", rig.machines[1].name, "mtu"]
    subprocess.run([*cable, "1400"], check=True)
    try:
        report = check(rig, inventory_of(rig, num_nodes=3), login)
    finally:
        subprocess.run([*cable, "1500"], check=True)
    found = [finding.cause for finding in report.findings if finding.check == "ports"]
    assert (
        "packets over 1400 bytes to node-1 get lost, but the interface sends packets of up to "
        "1500 bytes (MTU)" in found
    )


def test_a_hostname_on_127_0_1_1_and_a_full_disk_are_named(rig: Rig, login: Login) -> None:
    machine = rig.machines[1]
    machine.exec(["cp", "/etc/hosts", "/etc/hosts.kept"])
    machine.exec(["sh", "-c", "echo 127.0.1.1 node-1 > /etc/hosts"])
    machine.exec(["mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "tmpfs", "/mnt"])
    machine.exec(["cp", "-a", "/home/trainer/.ssh", "/mnt/"])
    machine.exec(["chown", "trainer:trainer", "/mnt"])
    machine.exec(["mount", "--bind", "/mnt", "/home/trainer"])
    try:
        report = check(rig, inventory_of(rig, num_nodes=2), login)
    finally:
        machine.exec(["umount", "/home/trainer"])
        machine.exec(["umount", "/mnt"])
        machine.exec(["mv", "/etc/hosts.kept", "/etc/hosts"])
    lines = [finding.line() for finding in report.findings if finding.node == "node-1"]
    assert any("own name 'node-1' resolves to 127.0.1.1 on this node" in line for line in lines)
    assert "GiB are free in /home/trainer" in errors(report)["node-1"]


def test_mpirun_crosses_machines_with_the_run_s_key(rig: Rig, login: Login, tmp_path: Path) -> None:
    inventory = inventory_of(rig, num_nodes=2)
    with rig.joined(), Cluster(inventory, login=login, env=os.environ) as cluster:
        key = install_run_key(cluster, name="run-1.00000000", lasts_s=600)
        settings = find("mpirun").settings(Reach(interface="ens4", ssh=("-F", str(key.config))))
        arguments = [f"{name}={value}" for name, value in settings.items()]
        argv = ["env", f"PATH={VENV}:/usr/bin:/bin", *arguments, f"{VENV}/mpirun"]
        argv += ["-f", "hosts", "-n", "2", "-ppn", "1", "hostname"]
        hosts = tmp_path / "hosts"
        hosts.write_text(render_hosts(inventory.nodes), encoding="ascii")
        head = cluster.connect(inventory.head)
        put(head, hosts, "hosts", timeout_s=DEADLINE_S)
        output = head.check_run(argv, timeout_s=DEADLINE_S)
        remove_run_key(cluster, "run-1.00000000")
        left = [
            cluster.connect(node).check_run(["cat", ".ssh/authorized_keys"], timeout_s=DEADLINE_S)
            for node in inventory.nodes
        ]
    assert sorted(output.decode().split()) == ["node-0", "node-1"]
    assert not [text for text in left if b"tileforge-run" in text]
