"""Ranks that hold a model together, and one of them is killed or stopped, or all are killed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from payload.core.errors import ExitCode
from payload.formats.checkpoint_listing import (
    checkpoint_folders,
    manifest_problems,
    partial_checkpoints,
)
from payload.orchestrate.__main__ import main
from payload.run_record.run_files import RunPaths
from payload.supervise.processes import processes_of
from tests.orchestrate.test_trainer import start
from tests.supervise.planned import wait_for_steps
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.ranks

SHARD = ("distributed.strategy=shard",)
PIPELINE = ("distributed.pipeline_parallel=2", "model.n_layer=2")
_HALF = "step_00000004.partial"
# Loaded by every rank: the first write of this checkpoint stops before its trainer.json.
_STOP_WHILE_WRITING = f"""
import os, sys, time

def stop(event, arguments, reached=os.path.join(os.path.dirname(__file__), "reached")):
    if event == "open" and "{_HALF}/trainer.json" in str(arguments[0]):
        if not os.path.exists(reached):
            os.mkdir(reached)
            time.sleep(3600)

sys.addaudithook(stop)
"""
BOTH = pytest.mark.parametrize(
    "settings",
    [SHARD, pytest.param(PIPELINE, marks=pytest.mark.seeds)],
    ids=["shard", "pipeline"],
)
ENDLESS = ("train.steps=100000", "train.checkpoint_every=0", "limits.max_restarts=0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (signal.SIGKILL, ExitCode.RANK_LOST, "was killed by signal 9 (SIGKILL)"),
        pytest.param(
            *(signal.SIGSTOP, ExitCode.HANG, "stopped by a signal: rank 1 on"),
            marks=pytest.mark.seeds,
        ),
    ],
    ids=["killed", "stopped"],
)
@BOTH
def test_a_rank_that_is_killed_or_stopped_is_named(
    tmp_path: Path, settings: tuple[str, ...], fault: signal.Signals, code: ExitCode, said: str
) -> None:
    process = start(tmp_path, *settings, *ENDLESS, "limits.hang_timeout_s=3")
    paths = RunPaths(tmp_path / "runs" / "one")
    pids = wait_for_steps(paths, step=3)
    os.kill(pids[1], fault)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, err
    assert said in err
    assert not processes_of(paths.root)


@pytest.mark.slow
@BOTH
def test_ranks_that_die_while_they_write_a_checkpoint_go_on_bitwise_from_the_one_before(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    steps = ("train.steps=8", "train.checkpoint_every=2", "limits.max_restarts=0")
    (tmp_path / "whole").mkdir()
    whole = start(tmp_path / "whole", *settings, *steps)
    assert whole.wait(DEADLINE_S) == 0
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(_STOP_WHILE_WRITING, encoding="utf-8")
    process = start(tmp_path, *settings, *steps, env={"PYTHONPATH": str(hook)})
    paths = RunPaths(tmp_path / "runs" / "one")
    pids = wait_for_steps(paths, step=1)
    half = hook / "reached"
    wait_until(half.exists, what="a checkpoint to be half written")
    assert [each.name for each in partial_checkpoints(paths.checkpoints)] == [_HALF]
    for pid in pids:
        with suppress(ProcessLookupError):  # the launcher was quicker, after the first one
            os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.RANK_LOST, err
    assert "was killed by signal 9 (SIGKILL)" in err
    left = checkpoint_folders(paths.checkpoints)
    assert [each.name for each in left] == ["step_00000002"]
    assert not any(map(manifest_problems, left))
    words = ["run", "--resume", "one", "--inventory", "local", "--runs-dir", str(tmp_path / "runs")]
    assert main(words, os.environ) == ExitCode.OK
    ours, theirs = (
        load_file(each.checkpoint(8) / "model.safetensors")
        for each in (paths, RunPaths(tmp_path / "whole" / "runs" / "one"))
    )
    assert all(torch.equal(each, theirs[name]) for name, each in ours.items())
