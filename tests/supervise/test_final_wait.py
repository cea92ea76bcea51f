"""The end of a run with a store: its outcome is on the disk before the wait for the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from payload.config.run_config import load_run_config
from payload.core.errors import ExitCode
from payload.launch.plan_record import LaunchPlan
from payload.run_record.run_files import Summary, read_json
from payload.supervise.uploader_and_restore import Uploader
from tests.supervise.planned import REPO, plan_stand_in, state_of
from tests.support.waiting import DEADLINE_S

_KEEPS_WHAT_IS_THERE = """
import os, shutil, sys
from pathlib import Path
from payload.supervise.__main__ import main
from payload.supervise.uploader_and_restore import Uploader
root, drain = Path(sys.argv[2]), Uploader.drain
def look_first(self, **options):
    shutil.copy(root / "state.json", root / "state_at_drain.json")
    shutil.copy(root / "summary.json", root / "summary_at_drain.json")
    drain(self, **options)
Uploader.drain = look_first
sys.exit(main(sys.argv[1:], os.environ))
"""


@pytest.mark.ranks
def test_the_outcome_is_written_before_the_wait_for_the_store(tmp_path: Path) -> None:
    settings = [f"storage.results={tmp_path / 'results'}"]
    paths = plan_stand_in(tmp_path / "run", settings=settings)
    command = [sys.executable, "-c", _KEEPS_WHAT_IS_THERE, "--run-dir", str(paths.root)]
    supervisor = subprocess.Popen(command, cwd=REPO)
    assert supervisor.wait(DEADLINE_S) == ExitCode.OK
    for name in ("state", "summary"):
        seen = json.loads((paths.root / f"{name}_at_drain.json").read_text())
        assert (seen["status"], seen["exit_class"]) == ("finished", "ok")
    # Later records have the store's state at that time.
    state, summary = state_of(paths), read_json(Summary, paths.summary)
    assert (state.status, state.exit_class) == ("finished", "ok")
    assert state.store is not None and state.store.is_drained
    assert summary is not None and summary.store == state.store
    assert [event.kind for event in state.events].count("finished") == 1


@pytest.mark.processes
@pytest.mark.parametrize(("most_s", "waits"), [(None, True), (0.0, False)])
def test_a_job_that_ends_soon_does_not_wait_for_the_store(
    tmp_path: Path, most_s: float | None, waits: bool
) -> None:
    settings = [f"storage.results={tmp_path / 'results'}"]
    paths = plan_stand_in(tmp_path / "run", settings=settings)
    uploading = Uploader(
        paths,
        plan=LaunchPlan.load(paths.plan),
        config=load_run_config(paths.config),
        env=os.environ,
    )
    uploading.begin()
    paused: list[float] = []

    def pause(seconds: float) -> bool:
        paused.append(seconds)
        return False

    uploading.drain(pause=pause, most_s=most_s)
    uploading.end(at_once=True)
    assert bool(paused) is waits
