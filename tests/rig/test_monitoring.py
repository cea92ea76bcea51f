"""Two machines that boot with monitoring: their services, ports and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.bootstrap_values import node_bootstrap
from infra.cloud_init import render_user_data
from infra.config import ClusterConfig
from payload import __version__
from tests.rig import prepared
from tests.rig.machine import Machine
from tests.rig.monitoring_layer import monitoring_layer
from tests.rig.network import address_of
from tests.rig.prepared import FILES
from tests.rig.rig import Rig
from tests.supervise.planned import wait_for

pytestmark = [pytest.mark.rig, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def rig(operator_key: Path) -> Iterator[Rig]:
    """Yield a head and a worker with the prepared environment, which has no prometheus_client."""
    public = operator_key.with_suffix(".pub").read_text(encoding="ascii")
    config = ClusterConfig(cluster="rig", node_count=2, monitoring="prometheus")
    node = replace(
        node_bootstrap(config, authorized_keys=(public,), version=__version__),
        extras="train",
        # apt.grafana.com cannot be reached; an existing package is not downloaded.
        extra_packages=("grafana",),
        is_monitored=True,
        nodes=tuple((f"node-{index}", address_of(index)) for index in range(2)),
    )
    user_data = render_user_data(node, FILES)
    with Rig([user_data] * 2, layers=[prepared.layer(), monitoring_layer()]) as made:
        states = made.wait_for_bootstrap(timeout_s=900)
        assert all(state["ok"] for state in states.values()), states
        yield made


def listening(machine: Machine) -> set[str]:
    """Return the TCP addresses with ports that the machine listens on."""
    lines = machine.exec(["ss", "--no-header", "--listening", "--tcp", "--numeric"]).stdout
    return {line.split()[3] for line in lines.splitlines()}


def fetch(machine: Machine, url: str) -> str:
    program = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=10).read().decode())"
    return machine.exec(["python3", "-c", program]).stdout


def test_everything_listens_on_loopback_or_the_node_s_own_address(rig: Rig) -> None:
    head, worker = rig.machines
    expected = {"127.0.0.1:9090", "127.0.0.1:3000", f"{head.address}:39100"}
    # A started service may not listen yet.
    wait_for(lambda: expected <= listening(head), "the head's services")
    assert f"{worker.address}:39100" in listening(worker)
    for machine in rig.machines:
        everywhere = {each for each in listening(machine) if each.startswith(("0.0.0.0", "*", "["))}
        assert {each.rpartition(":")[2] for each in everywhere} <= {"22"}


def test_a_worker_has_its_exporter_alone(rig: Rig) -> None:
    _, worker = rig.machines
    assert not {"127.0.0.1:9090", "127.0.0.1:3000"} & listening(worker)
    assert worker.exec(["systemctl", "is-active", "prometheus"], check=False).returncode != 0


def test_prometheus_sees_both_machines_by_name(rig: Rig) -> None:
    head, _ = rig.machines

    def up() -> dict[str, str]:
        url = 'http://127.0.0.1:9090/api/v1/query?query=up{job="machines"}'
        found = json.loads(fetch(head, url))["data"]["result"]
        return {each["metric"]["node"]: each["value"][1] for each in found}

    wait_for(lambda: up() == {"node-0": "1", "node-1": "1"}, "both machines")
    rules = json.loads(fetch(head, "http://127.0.0.1:9090/api/v1/rules"))["data"]["groups"]
    assert {group["name"] for group in rules} == {"run", "machines"}


def test_grafana_s_service_gets_the_project_s_settings(rig: Rig) -> None:
    head, _ = rig.machines
    shown = head.exec(["systemctl", "show", "grafana-server", "--property=EnvironmentFiles"]).stdout
    assert "/etc/tileforge/monitoring/grafana.env" in shown
    assert "tileforge-run" in fetch(head, "http://127.0.0.1:3000/dashboards/run.json")


def test_the_exporters_ports_are_kept_from_connections(rig: Rig) -> None:
    for machine in rig.machines:
        found = machine.exec(["sysctl", "-n", "net.ipv4.ip_local_reserved_ports"]).stdout
        assert {*found.strip().split(",")} >= {"39100", "39400"}
