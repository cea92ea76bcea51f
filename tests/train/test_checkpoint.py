"""Checkpoints: whole or absent, whatever happens while they are written."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from payload.errors import CheckpointError, TrainingError
from payload.run_config import OptimizerSection
from payload.train.checkpoint import (
    TrainerState,
    checkpoint_folders,
    load_optimizer_tensors,
    load_trainer_state,
    manifest_problems,
    newest_checkpoint,
    remove_old_checkpoints,
    save_checkpoint,
)
from payload.train.optimizer import Optimizers, build_optimizers
from tests.launching import REPO, rank_env
from tests.train.test_model import make_model, tokens

STATE = TrainerState(
    step=7,
    next_sample=56,
    tokens=448,
    seed=1,
    dtype="bf16",
    train_sha256="0" * 64,
    world_size=2,
)


def trained_optimizers(name: str = "adamw") -> Optimizers:
    model = make_model()
    settings = OptimizerSection(name=name)  # type: ignore[arg-type]
    optimizers = build_optimizers(model, settings)
    batch = tokens(2, 10)
    model(batch, batch).backward()
    optimizers.step()
    return optimizers


def save(folder: Path, optimizers: Optimizers | None = None) -> Path:
    optimizers = optimizers or trained_optimizers()
    save_checkpoint(
        folder,
        model=optimizers.model,  # type: ignore[arg-type]
        optimizer=optimizers.state_tensors(),
        state=STATE,
    )
    return folder


def test_a_sign_of_life_is_given_after_each_part_of_a_checkpoint(tmp_path: Path) -> None:
    optimizers = trained_optimizers()
    partial, parts = tmp_path / "step_00000007.partial", []
    save_checkpoint(
        tmp_path / "step_00000007",
        model=optimizers.model,  # type: ignore[arg-type]
        optimizer=optimizers.state_tensors(),
        state=STATE,
        progressed=lambda: parts.append(len(list(partial.iterdir()))),
    )
    files = len(list((tmp_path / "step_00000007").iterdir()))
    assert parts[:2] == [2, 3]
    assert len(parts) == 2 + (files - 1)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_state_comes_back_bit_by_bit(tmp_path: Path, name: str) -> None:
    before = trained_optimizers(name)
    save(tmp_path / "step_00000007", before)
    after = build_optimizers(before.model, OptimizerSection(name=name))  # type: ignore[arg-type]
    after.load_state_tensors(load_optimizer_tensors(tmp_path / "step_00000007"))
    expected = before.state_tensors()
    assert expected.keys() == after.state_tensors().keys()
    assert all(torch.equal(value, expected[key]) for key, value in after.state_tensors().items())
    assert load_trainer_state(tmp_path / "step_00000007") == STATE


def test_optimizer_state_of_another_model_is_refused() -> None:
    state = trained_optimizers().state_tensors()
    other = build_optimizers(make_model(n_layer=1), OptimizerSection())
    with pytest.raises(CheckpointError, match=r"fits no parameter of this model"):
        other.load_state_tensors(state)


def test_a_checkpoint_with_any_damaged_file_does_not_exist_for_resume(tmp_path: Path) -> None:
    good, newer = save(tmp_path / "step_00000007"), save(tmp_path / "step_00000014")
    assert newest_checkpoint(tmp_path) == newer
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json", "config.json"):
        content = bytearray((newer / name).read_bytes())
        content[len(content) // 2] ^= 1
        (newer / name).write_bytes(content)
        assert newest_checkpoint(tmp_path) == good
        assert manifest_problems(newer) == [f"{name}: its sha256 is not the manifest's."]
        content[len(content) // 2] ^= 1
        (newer / name).write_bytes(content)
        assert not manifest_problems(newer)
    (newer / "manifest.json").write_text("{}")
    assert newest_checkpoint(tmp_path) == good


def test_an_interrupted_write_leaves_the_older_checkpoint_and_is_cleaned_up(tmp_path: Path) -> None:
    good = save(tmp_path / "step_00000007")
    (tmp_path / "step_00000014.partial").mkdir()
    assert newest_checkpoint(tmp_path) == good
    remove_old_checkpoints(tmp_path, keep=2, newest=good)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000007"]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 100, 99):
        (tmp_path / f"step_{step:08d}").mkdir()
    remove_old_checkpoints(tmp_path, keep=2, newest=tmp_path / "step_00000100")
    assert [path.name for path in checkpoint_folders(tmp_path)] == [
        "step_00000099",
        "step_00000100",
    ]


def test_a_damaged_checkpoint_never_costs_the_one_just_written(tmp_path: Path) -> None:
    for step in (50, 60, 100):
        (tmp_path / f"step_{step:08d}").mkdir()
    remove_old_checkpoints(tmp_path, keep=1, newest=tmp_path / "step_00000060")
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step_00000060"]


def test_a_kill_at_any_moment_of_a_save_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """kill -9 at seven moments of writers that save one checkpoint after the other."""
    attempts = range(7)
    forker = subprocess.Popen(
        [sys.executable, "-c", _WRITERS, *(str(tmp_path / str(attempt)) for attempt in attempts)],
        env=rank_env(),
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert forker.stdout is not None
    for attempt in attempts:
        pid = int(forker.stdout.readline())
        time.sleep(0.007 * attempt)
        os.kill(pid, signal.SIGKILL)
        assert forker.stdout.readline() == "ended by signal 9\n"
        found = checkpoint_folders(tmp_path / str(attempt))
        assert found
        assert [problem for path in found for problem in manifest_problems(path)] == []
    assert forker.wait(30) == 0


# One writer after the other, each a process; importing torch once for all of them saves half a
# minute. Each tells its id once its first checkpoint is there.
_WRITERS = """
import os, sys
from pathlib import Path
from tests.train.test_checkpoint import save, trained_optimizers

optimizers = trained_optimizers()
for folder in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        for step in range(1, 10_000):
            save(Path(folder) / f"step_{step:08d}", optimizers)
            if step == 1:
                print(os.getpid(), flush=True)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    print(f"ended by signal {os.WTERMSIG(status)}", flush=True)
"""


def test_a_disk_that_refuses_is_one_clear_error_and_nothing_half_written(tmp_path: Path) -> None:
    """The limit on file size stands for a full disk: the kernel refuses the write."""
    good = save(tmp_path / "step_00000007")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(TrainingError, match=r"step_00000014: cannot be written .* Free disk"):
            save(tmp_path / "step_00000014")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]
    assert not manifest_problems(good)


def test_trainer_json_of_another_release_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "step_00000007")
    raw = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps({**raw, "schema_version": 9}))
    with pytest.raises(CheckpointError, match="schema_version is 9"):
        load_trainer_state(folder)
