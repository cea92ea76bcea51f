"""Monitoring of a cluster: its user-data, and that the rest of the graph is unchanged."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.cloud_init import GRAFANA_VERSION, MAX_BYTES
from infra.gcp.network import NODE_PORTS
from tests.infra.stacks import deploy
from tests.infra.test_cloud_init import read, written_files

BOOTSTRAP = Path(__file__).resolve().parents[2] / "bootstrap"
SETUP = BOOTSTRAP / "node-setup.sh"
NODES = "c-node-0=10.60.0.10 c-node-1=10.60.0.11"


def user_data(settings: dict[str, Any], folder: Path) -> str:
    (found,) = {
        str(instance["metadata"]["user-data"])
        for instance in deploy(settings, folder=folder).of_type("Instance")
    }
    return found


def in_script(code: str) -> str:
    """Return the output of functions of node-setup.sh, without its `main`."""
    script = SETUP.read_text(encoding="utf-8").replace('\nmain "$@"\n', "\n" + code)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    return done.stdout + (done.stderr if done.returncode else "")


def test_monitoring_changes_nothing_but_what_the_nodes_boot_with(tmp_path: Path) -> None:
    plain = deploy({}, folder=tmp_path / "plain")
    watched = deploy({"monitoring": "prometheus"}, folder=tmp_path / "watched")

    def without_user_data(resources: list[dict[str, Any]]) -> str:
        text = json.dumps(resources, sort_keys=True)
        text = re.sub(r'"user-data": "(\\.|[^"\\])*"', "", text)
        return re.sub(r'"replacement_?[tT]rigger": "?[^,}]*', "", text)

    assert without_user_data(plain.of_type("Firewall")) == without_user_data(
        watched.of_type("Firewall")
    )
    assert [each["name"] for each in plain.resources] == [
        each["name"] for each in watched.resources
    ]


def test_the_exporters_ports_are_within_what_is_open_between_nodes() -> None:
    ports = [int(port) for port in re.findall(r"EXPORTER_PORT=(\d+)", SETUP.read_text())]
    assert len(ports) == 2
    low, high = map(int, NODE_PORTS[-1].split("-"))
    assert all(low <= port <= high for port in ports)
    template = (BOOTSTRAP / "cloud-init.yaml.j2").read_text(encoding="utf-8")
    assert f"ip_local_reserved_ports = {ports[0]},{ports[1]}\n" in template


def test_user_data_carries_the_files_and_the_nodes(tmp_path: Path) -> None:
    text = user_data({"monitoring": "prometheus", "nodeCount": 2}, tmp_path)
    there = written_files(text)
    for path in (BOOTSTRAP / "monitoring").rglob("*"):
        if path.is_file():
            name = path.relative_to(BOOTSTRAP / "monitoring")
            assert there[f"/etc/tileforge/monitoring/{name}"] == path.read_bytes()
    conf = there["/etc/tileforge/bootstrap.conf"].decode()
    assert "MONITORING=prometheus\n" in conf and "EXTRAS=train,monitor\n" in conf
    assert re.search(r"NODES='\S+-node-0=10\.60\.0\.10 \S+-node-1=10\.60\.0\.11'\n", conf)
    assert f"GRAFANA_VERSION={GRAFANA_VERSION}\n" in conf
    assert len(text.encode()) < MAX_BYTES / 3


def test_without_it_nothing_of_it_is_there(tmp_path: Path) -> None:
    text = user_data({}, tmp_path)
    assert not any("monitoring" in entry["path"] for entry in read(text)["write_files"])
    assert "reserved_ports" not in text and "MONITORING=none" in text


def test_sixty_four_nodes_fit_into_user_data(tmp_path: Path) -> None:
    settings = {"monitoring": "prometheus", "nodeCount": 64, "maxHourlyUsd": "none"}
    assert "node-63=10.60.0.73" in user_data(settings, tmp_path)


@pytest.mark.processes
def test_prometheus_gets_every_node_by_its_name_and_address() -> None:
    found = json.loads(in_script(f'NODES="{NODES}"; targets 39100'))
    assert found == [
        {"targets": ["10.60.0.10:39100"], "labels": {"node": "c-node-0"}},
        {"targets": ["10.60.0.11:39100"], "labels": {"node": "c-node-1"}},
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("here", "own"),
    [("10.60.0.11 172.17.0.1", "10.60.0.11"), ("10.60.0.10", "10.60.0.10"), ("10.60.0.1", "error")],
)
def test_a_node_knows_its_own_address(here: str, own: str) -> None:
    said = in_script(f'NODES="{NODES}"; step=t; hostname() {{ echo "{here} "; }}; own_address')
    assert own in said and ("is in NODES" in said) == (own == "error")


@pytest.mark.processes
def test_a_node_that_is_not_in_the_list_fails_with_the_reason() -> None:
    said = in_script(
        f'step=t; MONITORING=prometheus; NODES="{NODES}"; '
        'hostname() { echo "10.60.0.1 "; }; step_monitoring'
    )
    assert "error: none of this node's addresses ( 10.60.0.1  ) is in NODES." in said


@pytest.mark.processes
def test_the_head_gets_prometheus_and_grafana_and_a_worker_its_exporter_alone() -> None:
    steps = (
        "say() { :; }; pause_apt_jobs() { :; }; resume_apt_jobs() { :; }; update_lists() { :; }\n"
        "has_package() { return 1; }; monitor_machine() { echo machine $1; }\n"
        "monitor_cluster() { echo cluster; }\n"
        f'MONITORING=prometheus; NODES="{NODES}"\n'
    )
    found = [
        in_script(steps + f'hostname() {{ echo "{here} "; }}; step_monitoring').split("\n")
        for here in ("10.60.0.10", "10.60.0.11")
    ]
    assert found == [["machine 10.60.0.10", "cluster", ""], ["machine 10.60.0.11", ""]]
    assert in_script("MONITORING=none; step_monitoring") == ""
