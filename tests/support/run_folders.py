"""Run folders like those of `orchestrate run`, for tests without training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from payload.run_record.run_files import RunPaths, RunState, write_json
from tests.supervise.planned import plan_stand_in


def make_run(
    root: Path, *, settings: Sequence[str] = (), steps: Sequence[int] = (), **state: Any
) -> RunPaths:
    """Plan a run, with an empty checkpoint after each of `steps`; `state` as in `write_state`."""
    paths = plan_stand_in(root, settings=settings)
    for step in steps:
        paths.checkpoint(step).mkdir(parents=True)
        (paths.checkpoint(step) / "manifest.json").write_text("{}", encoding="utf-8")
    if state:
        write_state(paths, **state)
    return paths


def write_state(paths: RunPaths, **fields: Any) -> None:
    """Write state.json of a run that is running now, changed by `fields`."""
    now = time.time()
    usual = {"status": "running", "supervisor_pid": 1, "node": "a"}
    times = {"started_unix": now, "updated_unix": now}
    write_json(paths.state, RunState(**{"run_id": paths.run_id, **usual, **times, **fields}))
