"""A resume with a store: it continues from the newest checkpoint of disk and store, or fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from payload.config.run_config import load_run_config
from payload.config.store_address import parse_store_address
from payload.core.errors import ExitCode, PreflightError
from payload.launch.plan_record import LaunchPlan
from payload.run_record.run_files import RunPaths, RunState, write_json
from payload.run_record.store_state import StoreState
from payload.storage.checkpoints import Upload
from payload.storage.objects import ObjectStore
from payload.storage.opening import open_store
from payload.storage.records import Records
from payload.supervise import uploader_and_restore as module
from payload.supervise.uploader_and_restore import Uploader
from tests.storage.folders import write_checkpoint
from tests.storage.server import BUCKET, Faults, FaultyProxy
from tests.supervise.planned import plan_stand_in, state_of, supervise
from tests.support.identities import write_identity
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.processes


@pytest.fixture
def resumed(tmp_path: Path) -> RunPaths:
    """The folder of a resumed run without a checkpoint on the disk."""
    return plan_resumed(tmp_path)


def plan_resumed(tmp_path: Path, *options: str, settings: tuple[str, ...] = ()) -> RunPaths:
    results = f"storage.results={tmp_path / 'store'}"
    paths = plan_stand_in(tmp_path / "a-run", *options, settings=(results, *settings))
    plan = json.loads(paths.plan.read_text())
    paths.plan.write_text(json.dumps({**plan, "resumes": True}))
    return write_identity(paths)


def store_of(paths: RunPaths) -> ObjectStore:
    return open_store(parse_store_address(str(paths.root.parent / "store" / paths.run_id)))


def store_steps(paths: RunPaths, *steps: int) -> None:
    """Put the run's records and checkpoints into its store."""
    Records(paths).send(store_of(paths))
    for step in steps:
        upload = Upload(write_checkpoint(paths.root.parent / "elsewhere", step, seed=0))
        upload.send(store_of(paths), may_write=lambda: None)
        upload.close()


def damage(paths: RunPaths, step: int) -> None:
    folder = paths.root.parent / "store" / paths.run_id / paths.checkpoint(step).name
    model = folder.parent / "checkpoints" / folder.name / "model.safetensors"
    content = model.read_bytes()
    model.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def wait_a_little(seconds: float) -> bool:
    time.sleep(seconds / 10)
    return True


def restore(
    paths: RunPaths, notes: list[str] | None = None, *, pause: Callable[[float], bool] | None = None
) -> RunState | None:
    uploading = Uploader(
        paths,
        plan=LaunchPlan.load(paths.plan),
        config=load_run_config(paths.config),
        env=os.environ,
    )
    said = [] if notes is None else notes
    return uploading.restore(pause=pause or wait_a_little, note=said.append)


def test_the_newest_checkpoint_comes_from_the_store_with_a_note(resumed: RunPaths) -> None:
    store_steps(resumed, 990, 1000)
    write_checkpoint(resumed.checkpoints, 500, seed=3)
    notes: list[str] = []
    restore(resumed, notes)
    assert resumed.checkpoint(1000).is_dir()
    assert notes[-1].startswith("the run resumes from step_00001000, downloaded from /")
    said = (resumed.logs / "storage.log").read_text().splitlines()
    assert said[0].startswith("downloading step_00001000 (0.00 GB) from /")


def test_a_long_restore_is_noted(resumed: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    log, notes = resumed.logs / "storage.log", list[str]()

    def start(verb: str, *, stderr: int) -> subprocess.Popen[str]:
        shell = ["sh", "-c", "echo bringing it >&2; read line"]
        return subprocess.Popen(shell, stdin=subprocess.PIPE, stderr=stderr, text=True)

    monkeypatch.setattr(Uploader, "_start", lambda self, *words, **to: start(*words, **to))
    deadline_s = time.monotonic() + DEADLINE_S

    def until_noted(seconds: float) -> bool:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
        return not notes  # then another command stops the run

    assert restore(resumed, notes, pause=until_noted) is None
    assert notes == ["bringing it"] == log.read_text().splitlines()


def test_without_a_valid_checkpoint_in_the_store_nothing_starts_from_scratch(
    resumed: RunPaths,
) -> None:
    store_steps(resumed, 990, 1000)
    damage(resumed, 990)
    damage(resumed, 1000)
    with pytest.raises(PreflightError, match="are damaged; the newest is step_00001000"):
        restore(resumed)


def test_a_restore_that_is_killed_is_no_reason_to_start_from_scratch(
    resumed: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_steps(resumed, 1000)
    start = Uploader._start

    def kill(self: Uploader, *words: str, stderr: int) -> subprocess.Popen[str]:
        process = start(self, *words, stderr=stderr)
        os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(Uploader, "_start", kill)
    with pytest.raises(PreflightError, match="killed by signal 9"):
        restore(resumed)


def test_a_store_that_cannot_be_read_may_have_a_newer_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = plan_resumed(tmp_path, settings=(f"storage.results=gs://{BUCKET}/runs",))
    write_checkpoint(paths.checkpoints, 500, seed=3)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FaultyProxy(Faults(seed=0)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        proxy.refuse = True
        with pytest.raises(PreflightError, match=r"permission denied.*resume from the disk alone"):
            restore(paths)


def test_an_older_checkpoint_on_the_disk_is_used_with_a_note(resumed: RunPaths) -> None:
    store_steps(resumed, 1000)
    damage(resumed, 1000)
    write_checkpoint(resumed.checkpoints, 500, seed=3)
    notes: list[str] = []
    restore(resumed, notes)
    assert "resumes from step_00000500 on the disk: step_00001000 in the store" in notes[-1]


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_folder_that_is_not_mounted_is_not_an_empty_store(
    resumed: RunPaths, on_disk: bool
) -> None:
    if on_disk:
        write_checkpoint(resumed.checkpoints, 500, seed=3)
        address = str(store_of(resumed).address)
        write_json(resumed.store_state, StoreState(address=address, checkpoint="step_00001000"))
    with pytest.raises(PreflightError, match=r"no run found.*mount this folder"):
        restore(resumed)


def test_a_run_without_a_checkpoint_starts_from_scratch(resumed: RunPaths) -> None:
    write_json(resumed.state, a_state(resumed, spent_s=12.0))
    store_steps(resumed)
    notes: list[str] = []
    before = restore(resumed, notes)
    assert before is not None and before.spent_s == 12.0
    assert "nor the disk has a checkpoint yet" in notes[-1]


def test_an_earlier_problem_is_discarded_and_a_lost_run_is_not_reclaimed(
    resumed: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []

    def start(*words: object, **more: object) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(["true"], stdin=subprocess.PIPE, text=True))
        return started[-1]

    monkeypatch.setattr(Uploader, "_start", start)
    monkeypatch.setattr(module, "_RESTART_S", 0.0)
    uploading = Uploader(
        resumed,
        plan=LaunchPlan.load(resumed.plan),
        config=load_run_config(resumed.config),
        env=os.environ,
    )
    kept = StoreState(
        address=str(store_of(resumed).address), checkpoint="step_00000010", token="0" * 32
    )
    write_json(resumed.store_state, replace(kept, is_idle=True, is_drained=True, lost=True))
    uploading.begin()
    assert uploading.state() == kept
    started[0].wait()
    # After a crash during the run, the counts are kept, and the problem is discarded.
    counted = replace(kept, sent_bytes=700, sent_unix=5.0, failures=3)
    write_json(resumed.store_state, replace(counted, problem="503", failing_since_unix=9.0))
    uploading.begin()
    assert len(started) == 2 and uploading.state() == counted
    started[1].wait()
    write_json(resumed.store_state, replace(kept, lost=True))
    uploading.begin()
    assert len(started) == 2


def a_state(paths: RunPaths, *, spent_s: float) -> RunState:
    return RunState(
        run_id=paths.run_id,
        status="running",
        started_unix=1.0,
        updated_unix=2.0,
        attempt=4,
        resumes=1,
        spent_s=spent_s,
    )


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("hours", "code"), [(1, ExitCode.BUDGET), (3, ExitCode.OK)])
def test_new_machines_get_what_is_left_of_the_budget_and_count_as_a_resume(
    tmp_path: Path, hours: int, code: ExitCode
) -> None:
    paths = plan_resumed(tmp_path, "--steps", "3", settings=(f"limits.max_hours={hours}",))
    write_json(paths.state, a_state(paths, spent_s=7200.0))
    store_steps(paths, 10)
    paths.state.unlink()
    assert supervise(paths).wait(DEADLINE_S) == code
    state = state_of(paths)
    assert (state.attempt, state.resumes, state.restarts()) == (5, 2, 2)
    assert state.spent_s > 7200.0
    assert state.events[0].kind == "resume"
