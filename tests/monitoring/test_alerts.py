"""Each alert fires only with its cause; test_dashboards.py tests alerts of a real run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from payload.monitor.local import FILES

CASES = Path(__file__).with_name("alerts_test.yml")


@pytest.mark.processes
def test_each_alert_fires_only_with_its_cause(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "test", "rules", str(CASES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_a_case_for_each_alert_with_and_without_its_cause() -> None:
    rules = yaml.safe_load((FILES / "alerts.yml").read_text(encoding="utf-8"))
    names = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    cases = [
        case
        for test in yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
        for case in test["alert_rule_test"]
    ]
    assert {each["alertname"] for each in cases if each.get("exp_alerts")} == names
    assert {each["alertname"] for each in cases if not each.get("exp_alerts")} == names
