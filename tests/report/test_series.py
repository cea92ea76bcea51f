"""A page's series from a run's rows, without a browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from payload.report.page import render
from payload.report.series import curves
from payload.report.source import Run
from payload.run_record.metrics_log import to_json_line
from payload.run_record.run_files import RunPaths
from tests.test_metrics_log import step_metrics


def test_losses_whose_sum_overflows_leave_a_page_without_their_mean(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "diverged")
    paths.root.mkdir()
    rows = [replace(step_metrics(step), loss=1e308) for step in (1, 2, 3)]
    paths.metrics.write_text("".join(map(to_json_line, rows)))
    run = Run(paths)
    assert curves(run)["rows"]["loss"] == [1e308] * 3
    assert None in curves(run)["rows"]["loss_smooth"]
    assert "1e+308" in render([run])
