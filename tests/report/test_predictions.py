"""The report compares the measured step with the plan's prediction, or with the calibration's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from payload.report.__main__ import main
from payload.report.predictions import predictions
from payload.report.source import Run
from payload.run_record.run_files import RunPaths
from tests.report.test_task_results import OLD_RUNS


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A copy of a run of one machine, whose plan has no predicted time."""
    found = RunPaths(Path(shutil.copytree(OLD_RUNS / "full", tmp_path / "runs" / "full")))
    assert json.loads(found.plan.read_text("utf-8"))["arithmetic"]["step_s"] is None
    return found


def add(path: Path, values: dict[str, Any]) -> None:
    """Add values to a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), encoding="utf-8")


def predicted(paths: RunPaths) -> dict[str, tuple[Any, str]]:
    """Return the predicted values and their sources by name."""
    found = predictions(Run(paths))
    return {each.name: (each.predicted.value, each.predicted.source) for each in found}


def page(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the report page."""
    assert main([str(paths.root)]) == 0
    capsys.readouterr()
    return paths.report.read_text(encoding="utf-8")


def test_a_run_without_a_planned_time_has_the_time_of_its_calibration(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predicted(paths)["a step"][0] is None
    assert "No time was predicted" in page(paths, capsys)
    add(paths.summary, {"predicted_step_s": 0.5, "final_val_step": 8})
    assert predicted(paths)["a step"] == (0.5, "summary.json#predicted_step_s")
    tokens = json.loads(paths.plan.read_text("utf-8"))["arithmetic"]["tokens_per_step"]
    assert predicted(paths)["tokens/s"] == (tokens / 0.5, "calibration.tokens_per_s")
    text = page(paths, capsys)
    assert "No time was predicted" not in text and "from the calibration at the start" in text
    assert 'data-source="summary.json#final_val_step"' in text


def test_the_planned_time_comes_before_the_calibrations(paths: RunPaths) -> None:
    add(paths.summary, {"predicted_step_s": 0.5})
    plan = json.loads(paths.plan.read_text("utf-8"))
    add(paths.plan, {"arithmetic": plan["arithmetic"] | {"step_s": 0.25}})
    assert predicted(paths)["a step"] == (0.25, "plan.json#arithmetic.step_s")
