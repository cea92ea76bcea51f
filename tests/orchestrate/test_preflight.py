"""`preflight` as a whole: three nodes that are real sshd processes, and this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import payload
from payload.config.run_config import RunConfig
from payload.core.errors import BootstrapError, ExitCode, RankLostError, TileforgeError
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.__main__ import main
from payload.orchestrate.findings.nodes import PROBED, reaches
from payload.orchestrate.hardware.nvidia import gpu_need
from payload.orchestrate.preflight import report as report_module
from payload.orchestrate.preflight.checks import check_cluster
from payload.orchestrate.preflight.report import BootWait, Report
from payload.orchestrate.ssh import connection as ssh
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.remote_calls import Login
from payload.stack.operator_key_file import make_operator_key
from tests.orchestrate.conftest import PATIENT, SILENT_LATER, StartSshd
from tests.orchestrate.sshd import Sshd, make_cluster, make_gcloud, make_key
from tests.support.nvidia_smi import L4, make_nvidia_smi
from tests.support.ports import free_port
from tests.support.waiting import DEADLINE_S
from tests.test_architecture import ROOT

READY = {
    "schema_version": 1,
    "step": "done",
    "ok": True,
    "reason": None,
    "version": payload.__version__,
    "sha": "abc",
}


@pytest.fixture
def nodes(start_sshd: StartSshd) -> list[Sshd]:
    started = [start_sshd(f"node-{i}", f"127.0.0.{i + 2}") for i in range(3)]
    for sshd in started:
        set_state(sshd)
    return started


def set_state(sshd: Sshd, **changes: Any) -> None:
    (sshd.home / "state.json").write_text(json.dumps(READY | changes), encoding="utf-8")


def check(inventory: ClusterInventory, login: Login) -> Report:
    with Cluster(inventory, login=login, env=os.environ, deadlines=PATIENT) as cluster:
        return check_cluster(inventory, cluster, state_file="~/state.json")


def errors(report: Report) -> dict[str, str]:
    return {f.node: f.line() for f in report.findings if f.severity == "error"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps .cluster out of this folder."""
    monkeypatch.chdir(tmp_path)


def preflight(inventory: ClusterInventory, login: Login, tmp_path: Path, *more: str) -> int:
    """The command itself."""
    path = tmp_path / "inventory.json"
    path.write_text(inventory.to_json(), encoding="utf-8")
    argv = ["preflight", "--inventory", str(path), "--ssh-key", str(login.key), *more]
    return main(argv, os.environ)


@pytest.mark.sshd
def test_three_good_nodes_pass_every_check(nodes: list[Sshd], login: Login) -> None:
    report = check(make_cluster(*(sshd.node for sshd in nodes)), login)
    assert errors(report) == {}
    assert report.exit_code == ExitCode.OK
    assert all(report.checks[f"node-{i}"] == list(PROBED) for i in range(3))
    assert all(facts.interface == "lo" for facts in report.facts.values())


@pytest.mark.sshd
def test_each_node_s_gpus_are_compared_with_the_run_s_need(
    start_sshd: StartSshd, login: Login, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(i: int, *gpus: dict[str, str], setting: str = "") -> Sshd:
        folder = make_nvidia_smi(tmp_path / f"bin-{i}", *gpus)
        # Each session of the node gets this PATH, as from the node's own settings.
        shell = folder / "session"
        shell.write_text(
            f'#!/bin/sh\nexport PATH={folder}:$PATH {setting}\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n'
        )
        shell.chmod(0o755)
        sshd = start_sshd(f"node-{i}", f"127.0.0.{i + 2}", more=f"ForceCommand {shell}")
        set_state(sshd)
        return sshd

    sshds = start(0, L4, L4), start(1, L4, L4, setting="CUDA_VISIBLE_DEVICES=1"), start(2, L4)
    inventory = make_cluster(*(replace(sshd.node, gpus=2) for sshd in sshds))
    with Cluster(inventory, login=login, env=os.environ, deadlines=PATIENT) as cluster:
        report = check_cluster(
            inventory,
            cluster,
            state_file="~/state.json",
            need=gpu_need(RunConfig(), inventory.nodes),
        )
    assert report.status("node-0", "gpu") == "ok" and report.exit_code == ExitCode.PREFLIGHT
    assert errors(report) == {
        "node-1": "node-1: CUDA_VISIBLE_DEVICES = '1' makes 1 of its 2 GPU(s) visible, the "
        "inventory "
        "requires 2. Unset this variable on the node, or set launch.ranks_per_node = 1.",
        "node-2": "node-2: nvidia-smi shows 1 GPU(s), the inventory requires 2. Correct the "
        "inventory or launch.ranks_per_node: each rank uses one GPU.",
    }
    notes = "\n".join(report.notes)
    assert "node-0: 2 x NVIDIA L4 (22.5 GiB), driver 580.95.05, ECC on" in notes
    # Where the inventory counts no GPU, a rank goes to each NUMA domain.
    uncounted = make_cluster(replace(sshds[2].node, physical_cores=2, numa_domains=2))
    preflight(uncounted, login, tmp_path, "--quick", "--json", "--set", "device.kind=cuda")
    found = [each["cause"] for each in json.loads(capsys.readouterr().out)["findings"]]
    assert "nvidia-smi shows 1 GPU(s), device.kind = 'cuda' requires 2" in found


@pytest.mark.sshd
def test_another_host_key_on_one_node_is_22_and_runs_nothing_there(
    nodes: list[Sshd], login: Login, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = nodes[1].with_host_key(make_key(tmp_path / "other"))
    inventory = make_cluster(nodes[0].node, wrong, nodes[2].node)
    assert preflight(inventory, login, tmp_path) == ExitCode.HOST_KEY
    said = capsys.readouterr()
    assert "error: node-1: host key" in said.out
    assert "node-1" in said.err.splitlines()[-1]
    assert "Accepted" not in nodes[1].log.read_text(encoding="utf-8")


@pytest.mark.sshd
def test_every_failing_node_is_in_the_report(
    nodes: list[Sshd], login: Login, tmp_path: Path
) -> None:
    refused = nodes[1]
    refused.authorized_keys.write_text(make_key(tmp_path / "other") + "\n", encoding="ascii")
    closed = replace(nodes[2].node, ssh_port=free_port("127.0.0.4"))
    report = check(make_cluster(nodes[0].node, refused.node, closed), login)
    found = errors(report)
    assert "refused the key" in found["node-1"]
    assert "cannot be reached from node-0" in found["node-2"]
    assert report.exit_code == ExitCode.SSH_AUTH
    assert report.status("node-0", "ssh") == "ok" and report.status("node-1", "cpu") == "-"


@pytest.mark.sshd
def test_a_node_that_falls_silent_once_connected_is_20_and_not_its_bootstrap_s_fault(
    nodes: list[Sshd], login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "_MARGIN_S", 0.5)
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    with Cluster(inventory, login=login, env=os.environ, deadlines=SILENT_LATER) as cluster:
        cluster.connect(nodes[2].node)
        nodes[2].signal(signal.SIGSTOP)
        try:
            report = check_cluster(inventory, cluster, state_file="~/state.json")
        finally:
            nodes[2].signal(signal.SIGCONT)
    (found,) = [finding for finding in report.findings if finding.severity == "error"]
    assert (found.node, found.check) == ("node-2", "ssh")
    assert "no response while running `python3`. The machine hangs" in found.line()
    assert report.exit_code == ExitCode.SSH_UNREACHABLE


@pytest.mark.sshd
def test_a_failed_bootstrap_is_30_with_its_step_and_log(nodes: list[Sshd], login: Login) -> None:
    set_state(nodes[2], step="packages", ok=False, reason="reading\nE: no package frobnicate")
    report = check(make_cluster(*(sshd.node for sshd in nodes)), login)
    assert report.exit_code == ExitCode.BOOTSTRAP
    assert "failed in step 'packages': E: no package frobnicate" in errors(report)["node-2"]
    assert "  | reading" in report.lines()


@pytest.mark.sshd
def test_differences_between_nodes_are_31_and_named(nodes: list[Sshd], login: Login) -> None:
    set_state(nodes[1], version="0.0.1")
    set_state(nodes[2], sha="def")
    inventory = make_cluster(replace(nodes[0].node, memory_gib=1e6), nodes[1].node, nodes[2].node)
    report = check(inventory, login)
    found = errors(report)
    assert "GiB of memory, but the inventory lists 1e+06" in found["node-0"]
    assert "it has payload 0.0.1" in found["node-1"]
    assert "differs from the one of node-0" in found["node-2"]
    assert report.exit_code == ExitCode.PREFLIGHT


@pytest.mark.sshd
def test_one_node_alone_has_no_way_to_others(nodes: list[Sshd], login: Login) -> None:
    report = check(make_cluster(nodes[0].node), login)
    assert report.exit_code == ExitCode.OK
    assert report.status("node-0", "route") == report.status("node-0", "ports") == "-"


@pytest.mark.sshd
def test_two_nodes_with_one_address_are_found(nodes: list[Sshd], login: Login) -> None:
    twin = replace(nodes[0].node, name="node-9")
    inventory = make_cluster(nodes[0].node, twin)
    with Cluster(inventory, login=login, env={}, deadlines=PATIENT) as cluster:
        report = check_cluster(inventory, cluster, state_file="~/state.json", mesh_s=2.0)
    assert any("cannot listen on 127.0.0.2" in line for line in errors(report).values())


@pytest.mark.sshd
def test_the_command_prints_json_for_programs(
    nodes: list[Sshd], login: Login, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inventory = make_cluster(nodes[0].node, nodes[1].node)
    code = preflight(inventory, login, tmp_path, "--json")
    # These nodes were never bootstrapped: the state file is not at its path on a real node.
    assert code == ExitCode.BOOTSTRAP
    printed = json.loads(capsys.readouterr().out)
    assert printed["exit_code"] == code and printed["exit_class"] == "bootstrap"
    assert printed["nodes"]["node-1"]["checks"]["ports"] == "ok"
    assert printed["nodes"]["node-1"]["facts"]["interface"] == "lo"
    assert {finding["check"] for finding in printed["findings"]} >= {"bootstrap"}


class Clock:
    """Replaces `time`: pauses take no time, and each can trigger an action."""

    def __init__(self, *events: Callable[[], object]) -> None:
        self.now, self.events = 0.0, list(events)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.events:
            self.events.pop(0)()


@pytest.mark.sshd
def test_nodes_that_boot_are_probed_again_until_they_are_ready(
    nodes: list[Sshd], login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = nodes[1].authorized_keys.read_text(encoding="ascii")
    nodes[1].authorized_keys.write_text("", encoding="ascii")
    set_state(nodes[1], step="payload", ok=None)
    clock = Clock(
        lambda: nodes[1].authorized_keys.write_text(keys, encoding="ascii"),
        lambda: set_state(nodes[1]),
    )
    monkeypatch.setattr(report_module, "time", clock)
    inventory = make_cluster(nodes[0].node, nodes[1].node)
    said: list[str] = []
    report = BootWait(600.0, said.append).until_ready(lambda: check(inventory, login))
    assert report.exit_code == ExitCode.OK and clock.now == 20.0
    refused, unfinished = said
    assert refused.startswith("waiting: node-1: ") and "refused the key" in refused
    assert unfinished == "waiting: node-1: bootstrap is not done yet; its current step is 'payload'"


@pytest.mark.sshd
def test_a_failed_bootstrap_is_not_waited_for(
    nodes: list[Sshd], login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_state(nodes[0], step="payload", ok=None)
    set_state(nodes[1], step="packages", ok=False, reason="E: no package")
    clock = Clock()
    monkeypatch.setattr(report_module, "time", clock)
    inventory = make_cluster(nodes[0].node, nodes[1].node)
    report = BootWait(600.0, print).until_ready(lambda: check(inventory, login))
    assert report.exit_code == ExitCode.BOOTSTRAP and clock.now == 0.0


@pytest.mark.sshd
def test_the_command_waits_no_longer_than_its_limit(
    nodes: list[Sshd],
    login: Login,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    monkeypatch.setattr(report_module, "time", clock)
    inventory = make_cluster(nodes[0].node)
    # These nodes never get a bootstrap.json at its path on a real node.
    more = ("--json", "--wait", "0.5")
    assert preflight(inventory, login, tmp_path, *more) == ExitCode.BOOTSTRAP
    said = capsys.readouterr()
    assert json.loads(said.out)["exit_class"] == "bootstrap"
    assert said.err.count("waiting: node-0: bootstrap has not reported") == 1 and clock.now == 30.0


def test_a_cluster_without_host_keys_is_waited_for_and_a_machine_that_is_gone_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_module, "time", Clock())
    answers: list[TileforgeError | str] = []

    def look() -> str:
        answer = answers.pop(0)
        if isinstance(answer, TileforgeError):
            raise answer
        return answer

    late, gone = BootstrapError("node-0: no host keys"), RankLostError("node-0: gone")
    answers[:] = [late, "a cluster"]
    assert BootWait(10.0, print).until_found(look) == "a cluster"
    answers[:] = [late, gone, "a cluster"]
    with pytest.raises(RankLostError):
        BootWait(60.0, print).until_found(look)
    answers[:] = [late, "a cluster"]
    with pytest.raises(BootstrapError):
        BootWait(5.0, print).until_found(look)


@pytest.mark.sshd
def test_the_head_is_reached_through_iap(
    nodes: list[Sshd], login: Login, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_gcloud(tmp_path, nodes[0].node)
    inventory = make_cluster(replace(nodes[0].node, zone="here"), nodes[1].node, kind="iap")
    env = {**os.environ, "PATH": str(tmp_path)}
    with Cluster(inventory, login=login, env=env, deadlines=PATIENT) as cluster:
        report = check_cluster(inventory, cluster, state_file="~/state.json")
    assert errors(report) == {}


@pytest.mark.sshd
def test_the_operator_s_own_ssh_reaches_every_node_afterwards(
    nodes: list[Sshd], login: Login, tmp_path: Path
) -> None:
    inventory = make_cluster(*(sshd.node for sshd in nodes))
    assert preflight(inventory, login, tmp_path) == ExitCode.BOOTSTRAP
    for sshd in nodes:
        argv = ["ssh", "-F", ".cluster/test/ssh_config", sshd.node.name, "echo", "$HOME"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.stdout.strip() == str(sshd.home), done.stderr


@pytest.mark.parametrize("project", [None, "project"])
def test_without_a_key_one_is_created_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], project: str | None
) -> None:
    node = {
        "name": "node-0",
        "address": "127.0.0.1",
        "host_keys": [make_public_host_key()],
        "physical_cores": 1,
        "memory_gib": 1,
    }
    inventory = {"schema_version": 1, "cluster": "mine", "source": "file", "ssh_user": "trainer"}
    inventory |= {"access": {"kind": "direct"}, "bucket": None, "nodes": [node]}
    inventory |= {"project": project}
    (tmp_path / "inventory.json").write_text(json.dumps(inventory), encoding="utf-8")
    code = main(["preflight", "--inventory", "inventory.json"], os.environ)
    assert code == ExitCode.SSH_AUTH
    key = tmp_path / ".cluster" / "mine" / "id_ed25519"
    public, said = make_operator_key(key), capsys.readouterr().err
    assert public in said
    # Where OS Login decides, users cannot add keys to a node's authorized_keys.
    command = f"gcloud compute os-login ssh-keys add --key-file={key}.pub"
    assert (command in said) is (project is not None)
    assert key.with_name(f"{key.name}.pub").read_text(encoding="ascii") == f"{public}\n"


def make_public_host_key() -> str:
    """A valid key that belongs to no user."""
    return "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"


@pytest.mark.ranks
def test_this_machine_is_checked_and_measured_without_ssh(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["preflight", "--inventory", "local", "--json"], os.environ)
    said = capsys.readouterr()
    printed = json.loads(said.out)
    (node,) = printed["nodes"].values()
    assert code == printed["exit_code"] == ExitCode.OK, said.out
    assert node["checks"]["cpu"] in ("ok", "warning") and node["checks"]["ssh"] == "-"
    assert node["checks"]["speed"] in ("ok", "warning")
    (speed,) = printed["measured"]["nodes"].values()
    assert min(speed["bf16_flops_per_s"], speed["fp32_flops_per_s"]) > 1e8
    assert len(printed["notes"]) == 1


@pytest.mark.processes
def test_quick_starts_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight", "--inventory", "local", "--quick", "--json"], os.environ) == 0
    printed = json.loads(capsys.readouterr().out)
    (node,) = printed["nodes"].values()
    assert printed["measured"] is None and node["checks"]["speed"] == "-"


@pytest.mark.processes
def test_a_config_that_run_would_refuse_is_refused_before_any_node_is_contacted(
    login: Login, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [
        Node(name=f"node-{i}", address=f"127.0.0.{i + 2}", physical_cores=4, memory_gib=64)
        for i in range(3)
    ]
    config = str(ROOT / "payload" / "configs" / "quickstart.toml")
    code = preflight(make_cluster(*nodes), login, tmp_path, "--config", config)
    said = capsys.readouterr().err
    assert code == ExitCode.CONFIG
    assert "batch.global_batch_size = 8 is not a multiple of" in said and "Use 24." in said
    assert not (tmp_path / ".cluster").exists()


@pytest.mark.processes
def test_this_machine_is_checked_against_the_inventory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {"name": "me", "address": "127.0.0.1", "physical_cores": 4096, "memory_gib": 1}
    inventory = {"schema_version": 1, "cluster": "mine", "source": "file", "ssh_user": ""}
    inventory |= {"access": {"kind": "local"}, "bucket": None, "nodes": [node]}
    path = tmp_path / "inventory.json"
    path.write_text(json.dumps(inventory), encoding="utf-8")
    assert main(["preflight", "--inventory", str(path)], os.environ) == ExitCode.PREFLIGHT
    said = capsys.readouterr()
    words = " ".join(said.out.split())
    assert "-> error: it has" in words and "but the inventory lists 4096. Correct" in words
    assert "error: 1 of 1 node(s) not fit: me" in said.err


def test_a_port_counts_as_open_to_others_only_if_the_head_itself_answers_there() -> None:
    head = make_cluster(
        Node(name="node-0", address="127.0.0.1", physical_cores=1, memory_gib=1)
    ).head
    port = free_port("127.0.0.1")
    assert not reaches(head, [], port=port, trial="t", within_s=0.3)
    with socket.create_server(("127.0.0.1", port)) as proxy, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            connection, _ = proxy.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200\r\n")

        pool.submit(answer)
        assert not reaches(head, [], port=port, trial="t", within_s=0.3)
