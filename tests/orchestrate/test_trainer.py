"""The real trainer under the real launcher: it trains, and a killed rank is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from payload.config.run_config import parse_run_config
from payload.core.errors import INTERRUPTED, ExitCode
from payload.formats.checkpoint_listing import checkpoint_folders, manifest_problems
from payload.orchestrate.__main__ import main
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RankProgress, RunPaths, RunState, Summary, read_json
from payload.supervise.processes import processes_of
from tests.supervise.planned import REPO, state_of, wait_for, wait_for_steps
from tests.support.data_folders import make_data_folder
from tests.support.small_disk import SmallDisk
from tests.support.waiting import DEADLINE_S
from tests.test_checkpoint_listing import make_checkpoint

pytestmark = pytest.mark.ranks
SETTINGS = (
    "data.sequence_length=32",
    "model.preset=tiny",
    "model.n_layer=1",
    "batch.global_batch_size=2",
    "batch.micro_batch_size=1",
    "precision.dtype=fp32",
    "launch.ranks_per_node=2",
)
# Steps of a millisecond or two, for runs that a test ends.
SMALLEST = ("model.n_head=2", "model.n_embd=16", "launch.threads_per_rank=1")


def start(
    folder: Path,
    *settings: str,
    runs_dir: Path | None = None,
    env: Mapping[str, str] | None = None,
    vocab_size: int = 50257,
) -> subprocess.Popen[str]:
    data = make_data_folder(
        folder / "data", num_train_tokens=4000, num_val_tokens=200, vocab_size=vocab_size
    )
    chosen = (*SETTINGS, f"data.dir={data}", *settings)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "payload.orchestrate", "run", "--run-id", "one"),
            *("--inventory", "local", "--yes"),
            *("--runs-dir", str(runs_dir or folder / "runs")),
            *(word for setting in chosen for word in ("--set", setting)),
        ],
        cwd=REPO,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_backend_that_is_not_here_is_refused_before_the_start(tmp_path: Path) -> None:
    process = start(tmp_path, "distributed.backend=nccl")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.CONFIG
    assert "distributed.backend = 'nccl'" in err


@pytest.mark.slow
def test_a_run_continues_on_a_full_disk_and_fails_when_it_must_save(
    tmp_path: Path, small_disk: SmallDisk
) -> None:
    sizes = (*SMALLEST, "launch.ranks_per_node=1")
    endless = ("train.steps=100000", "train.checkpoint_every=0", "train.keep_checkpoints=1")
    process = start(tmp_path, *sizes, *endless, runs_dir=small_disk.path, vocab_size=512)
    paths = RunPaths(small_disk.path / "one")
    wait_for_steps(paths, ranks=1, step=3)
    small_disk.fill()
    wait_for(lambda: shown_step(paths) > losses_so_far(paths) + 20, "rows that wait")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.TRAINING, err
    words = f"{paths.metrics} cannot be written (No space left on device). Free disk space"
    assert words in err
    state, result = state_of(paths), read_json(Summary, paths.summary)
    assert (state.status, state.exit_class, state.failed_rank) == ("failed", "training", 0)
    assert result is not None and (result.status, result.error) == ("failed", state.error)
    assert not processes_of(paths.root)


def shown_step(paths: RunPaths) -> int:
    """Return the step of rank 0's heartbeat."""
    shown = read_json(RankProgress, paths.rank_progress(0))
    assert shown is not None
    return shown.step


def losses_so_far(paths: RunPaths) -> int:
    """Steps in metrics.jsonl, which has each of them once."""
    steps = [row["step"] for row in read_metrics(paths.metrics) if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))
    return len(steps)


@pytest.mark.slow
def test_a_step_of_many_passes_is_left_when_the_run_is_stopped(tmp_path: Path) -> None:
    """One step takes hours here; a stop must not wait for its completion."""
    process = start(tmp_path, "batch.global_batch_size=2000000", "train.checkpoint_every=1")
    paths = RunPaths(tmp_path / "runs" / "one")
    deadline = time.monotonic() + DEADLINE_S
    while not re.search(r'"micro_step": [1-9]', _text(paths.rank_progress(1))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    beat = read_json(RankProgress, paths.rank_progress(1))
    assert beat is not None and (beat.phase, beat.step) == ("step", 0)
    assert beat.micro_steps == 1_000_000
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == INTERRUPTED
    summary = read_json(Summary, paths.summary)
    assert summary is not None
    assert (summary.status, summary.steps, summary.ranks_identical) == ("stopped", 0, True)
    assert not paths.checkpoints.exists()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_last_checkpoint_is_offered(tmp_path: Path) -> None:
    settings = ("train.steps=100000", "train.checkpoint_every=1", "limits.max_restarts=0")
    process = start(tmp_path, *SMALLEST, *settings, vocab_size=512)
    paths = RunPaths(tmp_path / "runs" / "one")
    pids = wait_for_steps(paths, step=3)
    os.kill(pids[1], signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.RANK_LOST
    assert "error: rank 1 on " in err and "was killed by signal 9 (SIGKILL)" in err
    folders = checkpoint_folders(paths.checkpoints)
    assert folders
    assert [problem for folder in folders for problem in manifest_problems(folder)] == []
    summary = read_json(Summary, paths.summary)
    rows = [row for row in read_metrics(paths.metrics) if "loss" in row]
    assert summary is not None
    assert (summary.status, summary.exit_class) == ("failed", "rank_lost")
    assert (summary.steps, summary.final_loss) == (rows[-1]["step"], rows[-1]["loss"])
    assert summary.tokens_per_s is not None
    assert summary.wall_s >= sum(row["step_time_s"] for row in rows)
    assert "run --resume one" in err
    assert not processes_of(paths.root)


# Loaded by every process: rank 1 signals itself once, when the file is there and 12 steps are done.
# A test that sent it might be late: the whole run takes seconds. Each step reads statm.
_SIGNAL_ITSELF = """
import os, sys

def at_a_step(event, arguments, folder=os.path.dirname(__file__)):
    if event != "open" or str(arguments[0]) != "/proc/self/statm" or os.environ["RANK"] != "1":
        return
    run = os.environ["TILEFORGE_RUN_DIR"]
    if not os.path.exists(os.path.join(run, {file!r})):
        return
    with open(os.path.join(run, "metrics.jsonl"), "rb") as metrics:
        steps = metrics.read().count(b"\\n")
    if steps >= 12 and not os.path.exists(os.path.join(folder, "sent")):
        os.mkdir(os.path.join(folder, "sent"))
        os.kill(os.getpid(), {number})

if "RANK" in os.environ:
    sys.addaudithook(at_a_step)
"""


def signalling_itself(folder: Path, number: signal.Signals, *, after: str) -> Mapping[str, str]:
    """Return variables by which rank 1 gets a signal in the middle of a run that has the file."""
    folder.mkdir()
    text = _SIGNAL_ITSELF.format(file=after, number=int(number))
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.slow
def test_a_rank_that_gets_sigterm_is_lost_and_the_run_continues_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    settings = ("train.steps=150", "train.checkpoint_every=0", "limits.max_restarts=1")
    env = signalling_itself(tmp_path / "hook", signal.SIGTERM, after="metrics.jsonl")
    process = start(tmp_path, *settings, env=env)
    paths = RunPaths(tmp_path / "runs" / "one")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "was sent SIGTERM, but not by this run's supervisor" in err
    assert "Continuing from checkpoint step_" in err and "(restart 1 of 1)" in err
    summary = read_json(Summary, paths.summary)
    assert summary is not None
    assert (summary.status, summary.steps, summary.restarts) == ("finished", 150, 1)
    rows = [row for row in read_metrics(paths.metrics) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 151))
    assert all(row["time_unix"] > 0 for row in rows)
    assert not processes_of(paths.root)


@pytest.mark.parametrize("found_before", [True, False])
def test_a_resume_on_a_full_disk_is_refused_in_one_line(
    tmp_path: Path,
    small_disk: SmallDisk,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    found_before: bool,
) -> None:
    """By the check of the room for checkpoints, or when the first file does not fit."""
    if not found_before:
        monkeypatch.setattr("payload.orchestrate.sites.local.require_disk", lambda _planned: None)
    data = make_data_folder(tmp_path / "data", num_train_tokens=4000, num_val_tokens=200)
    settings = (*SETTINGS, f"data.dir={data}", "train.steps=3")
    text = parse_run_config("", overrides=settings, where="test").to_toml()
    paths = RunPaths(small_disk.path / "one")
    make_checkpoint(paths.checkpoint(1), config=text)
    paths.config.write_text(text)
    small_disk.fill()
    words = ["run", "--resume", "one", "--inventory", "local", "--runs-dir", str(small_disk.path)]
    words += ["--set", f"data.dir={data}"]  # the run was not started by a command
    assert main(words, os.environ) == (ExitCode.CONFIG if found_before else ExitCode.PREFLIGHT)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and "Free " in last, last


@pytest.mark.slow
def test_a_stopped_rank_is_a_hang_and_the_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    settings = ("train.steps=150", "train.checkpoint_every=10", "limits.hang_timeout_s=3")
    first = "checkpoints/step_00000010/manifest.json"
    env = signalling_itself(tmp_path / "hook", signal.SIGSTOP, after=first)
    process = start(tmp_path, *settings, env=env)
    paths = RunPaths(tmp_path / "runs" / "one")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert f"checkpoint       {paths.checkpoint(150)}" in out
    assert "no rank made progress for" in err and "stopped by a signal: rank 1 on" in err
    assert ". Continuing from checkpoint step_000" in err and "(restart 1 of 3)" in err
    summary, state = read_json(Summary, paths.summary), read_json(RunState, paths.state)
    assert summary is not None and state is not None
    assert (summary.status, summary.steps, summary.restarts) == ("finished", 150, 1)
    assert (state.attempt, state.status) == (2, "finished")
    assert (summary.world_size, summary.ranks_identical) == (2, True)
    steps = [row["step"] for row in read_metrics(paths.metrics) if "loss" in row]
    assert steps == list(range(1, 151))
    assert not processes_of(paths.root)
