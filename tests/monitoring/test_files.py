"""Configuration of Prometheus and Grafana, checked with promtool and Grafana's documentation."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from payload.monitor.local import FILES, grafana_settings
from payload.monitor.run_metrics import METRICS
from tests.monitoring.watched import DASHBOARDS, load

REPO = Path(__file__).parents[2]
# https://grafana.com/docs/grafana/latest/panels-visualizations/visualizations/
_PANELS = {"timeseries", "stat", "bargauge"}
# packages/grafana-data/src/valueFormats/categories.ts
_UNITS = {"none", "s", "bytes", "decmbytes", "Bps", "percent", "percentunit", "currencyUSD"} | {
    *("locale", "sci", "watt", "celsius", "bool_yes_no")
}


@pytest.mark.processes
@pytest.mark.parametrize("what", ["config", "rules"])
def test_promtool_accepts_the_files(promtool: str, what: str, tmp_path: Path) -> None:
    name = "prometheus.yml" if what == "config" else "alerts.yml"
    argv = [promtool, "check", what, str(FILES / name)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))
def test_a_dashboard_follows_grafana_s_documented_format(path: Path) -> None:
    """https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/"""
    found = load(path)
    assert found["uid"] == f"tileforge-{path.stem}" and len(found["uid"]) <= 40
    assert found["title"] and found["schemaVersion"] == 39 and "id" not in found
    assert {"time", "templating", "annotations", "panels", "tags"} <= {*found}
    identities = [panel["id"] for panel in found["panels"]]
    assert len({*identities}) == len(identities)
    for panel in found["panels"]:
        assert panel["type"] in _PANELS
        assert panel["fieldConfig"]["defaults"]["unit"] in _UNITS
        assert panel["datasource"] == {"type": "prometheus", "uid": _datasource()["uid"]}
        references = [target["refId"] for target in panel["targets"]]
        assert references and len({*references}) == len(references)
    cells = [_cells(panel["gridPos"]) for panel in found["panels"]]
    assert all(x < 24 for each in cells for x, _ in each)
    assert not any(one & other for one, other in combinations(cells, 2))


def _cells(place: dict[str, int]) -> set[tuple[int, int]]:
    across = range(place["x"], place["x"] + place["w"])
    down = range(place["y"], place["y"] + place["h"])
    return {(x, y) for x in across for y in down}


def _datasource() -> dict[str, Any]:
    text = (FILES / "grafana" / "datasources" / "tileforge.yml").read_text(encoding="utf-8")
    (found,) = yaml.safe_load(text)["datasources"]
    assert isinstance(found, dict)
    return found


def test_grafana_s_provisioning_names_prometheus_and_the_folder_of_dashboards() -> None:
    assert _datasource()["url"] == "http://127.0.0.1:9090"
    text = (FILES / "grafana" / "dashboards" / "tileforge.yml").read_text(encoding="utf-8")
    provisioned = yaml.safe_load(text)
    (provider,) = provisioned["providers"]
    assert provisioned["apiVersion"] == 1 and provider["allowUiUpdates"] is False
    assert provider["options"]["path"] == "/etc/tileforge/monitoring/dashboards"


def test_a_local_grafana_gets_its_own_addresses_and_folders(tmp_path: Path) -> None:
    (tmp_path / "grafana").mkdir()
    for name in ("datasources", "dashboards"):
        source = FILES / "grafana" / name / "tileforge.yml"
        (tmp_path / "grafana" / name).mkdir()
        (tmp_path / "grafana" / name / "tileforge.yml").write_bytes(source.read_bytes())
    (tmp_path / "grafana.env").write_bytes((FILES / "grafana.env").read_bytes())
    settings = grafana_settings(tmp_path, port=4321, prometheus_url="http://127.0.0.1:9999")
    assert settings["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert settings["GF_SERVER_HTTP_PORT"] == "4321"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    texts = [
        (tmp_path / "grafana" / name / "tileforge.yml").read_text(encoding="utf-8")
        for name in ("datasources", "dashboards")
    ]
    assert "url: http://127.0.0.1:9999\n" in texts[0]
    assert f"path: {tmp_path}/dashboards\n" in texts[1]


def test_the_key_of_grafana_s_packages_has_the_documented_fingerprint() -> None:
    """RFC 4880, 12.2: a V4 key's fingerprint is the SHA-1 of its packet."""
    lines = (FILES / "grafana.asc").read_text(encoding="ascii").splitlines()
    body = [line for line in lines[lines.index("") + 1 :] if line and line[0] not in "=-"]
    packets = base64.b64decode("".join(body))
    assert packets[0] == 0x99, "an old-format public key packet with a length of two bytes"
    length = int.from_bytes(packets[1:3], "big")
    fingerprint = hashlib.sha1(packets[: 3 + length]).hexdigest().upper()
    assert fingerprint == "B53AE77BADB630A683046005963FA27710458545"
    for name in ("docs/guides/monitoring.md", "docs/explanations/security.md"):
        assert fingerprint in (REPO / name).read_text(encoding="utf-8")


def test_the_page_on_monitoring_names_every_metric_and_alert() -> None:
    page = (REPO / "docs" / "guides" / "monitoring.md").read_text(encoding="utf-8")
    rules = yaml.safe_load((FILES / "alerts.yml").read_text(encoding="utf-8"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert [name for name in alerts if f"`{name}`" not in page] == []
    assert [metric.name for metric in METRICS if f"`{metric.name}`" not in page] == []
