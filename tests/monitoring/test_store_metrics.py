"""The exporter's metrics of a run's store match storage.json."""

from __future__ import annotations

import time
from pathlib import Path

from payload.monitor.run_metrics import PREFIX, RunMetrics
from payload.run_record.run_files import RunPaths, write_json
from payload.run_record.store_state import StoreState


def of_store(paths: RunPaths) -> dict[str, float]:
    found = {each.name.removeprefix(PREFIX): each.value for each in RunMetrics(paths).samples()}
    return {name: value for name, value in found.items() if name.startswith("store_")}


def test_the_metrics_of_a_failing_store_match_storage_json(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "a-run")
    paths.root.mkdir()
    assert of_store(paths) == {}
    began = time.time() - 100
    state = StoreState(
        address="/results/a-run",
        checkpoint="step_00000120",
        sent_bytes=7_000,
        sent_unix=began,
        waiting_checkpoints=2,
        waiting_bytes=500,
        problem="503",
        failing_since_unix=began,
        failures=3,
    )
    write_json(paths.store_state, state)
    found = of_store(paths)
    for name in ("store_failing_seconds", "store_upload_age_seconds"):
        assert 100 <= found.pop(name) <= time.time() - began
    assert found == {
        "store_checkpoint_step": 120,
        "store_sent_bytes": 7_000,
        "store_waiting_bytes": 500,
        "store_failures": 3,
    }


def test_a_working_store_has_failed_for_0_seconds_and_may_have_no_checkpoint(
    tmp_path: Path,
) -> None:
    paths = RunPaths(tmp_path / "a-run")
    paths.root.mkdir()
    write_json(paths.store_state, StoreState(address="/results/a-run"))
    assert of_store(paths) == {
        "store_sent_bytes": 0,
        "store_waiting_bytes": 0,
        "store_failures": 0,
        "store_failing_seconds": 0.0,
    }
