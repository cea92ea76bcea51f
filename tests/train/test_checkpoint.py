"""Checkpoints: complete or absent, whatever happens during a write."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from payload.config.training_sections import OptimizerSection
from payload.core.errors import CheckpointError, TrainingError
from payload.formats.checkpoint_listing import checkpoint_folders, manifest_problems
from payload.train.checkpoints.checkpoint import (
    TrainerState,
    load_trainer_state,
    newest_checkpoint,
    optimizer_tensors,
    remove_old_checkpoints,
    save_checkpoint,
)
from payload.train.checkpoints.snapshot import Snapshot
from payload.train.models.base import CausalLM
from payload.train.optimizers.optimizer import Optimizers, build_optimizers
from tests.support.launching import REPO, rank_env
from tests.support.waiting import DEADLINE_S
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
    settings = OptimizerSection(name=name)
    optimizers = build_optimizers(model, settings)
    batch = tokens(2, 10)
    model(batch, batch).backward()
    optimizers.step()
    return optimizers


def model_of(optimizers: Optimizers) -> CausalLM:
    assert isinstance(optimizers.model, CausalLM)
    return optimizers.model


def save(folder: Path, optimizers: Optimizers | None = None) -> Path:
    optimizers = optimizers or trained_optimizers()
    save_checkpoint(
        folder,
        model=model_of(optimizers),
        snapshot=Snapshot.of(model_of(optimizers), optimizers.state_tensors()),
        state=STATE,
        tokenizer={},
    )
    return folder


def test_a_heartbeat_is_sent_after_each_part_of_a_checkpoint(tmp_path: Path) -> None:
    optimizers = trained_optimizers()
    partial, parts = tmp_path / "step_00000007.partial", []
    save_checkpoint(
        tmp_path / "step_00000007",
        model=model_of(optimizers),
        snapshot=Snapshot.of(model_of(optimizers), optimizers.state_tensors()),
        state=STATE,
        tokenizer={},
        progressed=lambda: parts.append(len(list(partial.iterdir()))),
    )
    tensors = len(optimizers.model.state_dict()) + len(optimizers.state_tensors())
    files = len(list((tmp_path / "step_00000007").iterdir()))
    assert len(parts) == tensors + (files - 1)
    assert parts == sorted(parts)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon"])
def test_optimizer_state_comes_back_bit_by_bit(tmp_path: Path, name: str) -> None:
    before = trained_optimizers(name)
    save(tmp_path / "step_00000007", before)
    after = build_optimizers(before.model, OptimizerSection(name=name))
    after.load_state_tensors(optimizer_tensors(tmp_path / "step_00000007"))
    expected = before.state_tensors()
    assert expected.keys() == after.state_tensors().keys()
    assert all(torch.equal(value, expected[key]) for key, value in after.state_tensors().items())
    assert load_trainer_state(tmp_path / "step_00000007") == STATE


def test_optimizer_state_of_another_model_is_refused() -> None:
    state = trained_optimizers().state_tensors()
    other = build_optimizers(make_model(n_layer=1), OptimizerSection())
    with pytest.raises(CheckpointError, match=r"fits no parameter of this model"):
        other.load_state_tensors(state)


def test_optimizer_state_of_another_shape_is_refused_also_where_it_is_one_number() -> None:
    """The kernels would write beyond its memory."""
    state = trained_optimizers().state_tensors()
    optimizers = build_optimizers(make_model(), OptimizerSection())
    with pytest.raises(CheckpointError, match=r"'exp_avg\.wte\.weight' of shape \(\) fits no"):
        optimizers.load_state_tensors(state | {"exp_avg.wte.weight": torch.zeros(())})


def test_a_checkpoint_with_any_damaged_file_does_not_exist_for_resume(tmp_path: Path) -> None:
    good, newer = save(tmp_path / "step_00000007"), save(tmp_path / "step_00000014")
    assert newest_checkpoint(tmp_path) == newer
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json", "config.json"):
        content = bytearray((newer / name).read_bytes())
        content[len(content) // 2] ^= 1
        (newer / name).write_bytes(content)
        assert newest_checkpoint(tmp_path) == good
        assert manifest_problems(newer) == [
            f"{name}: its SHA-256 differs from the one in the manifest."
        ]
        content[len(content) // 2] ^= 1
        (newer / name).write_bytes(content)
        assert not manifest_problems(newer)
    (newer / "manifest.json").write_text("{}")
    assert newest_checkpoint(tmp_path) == good


def test_a_file_that_cannot_be_read_is_a_problem_of_its_checkpoint_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first page of /proc/self/mem is an I/O error, as on a broken disk."""
    good, newer = save(tmp_path / "step_00000007"), save(tmp_path / "step_00000014")
    (newer / "trainer.json").unlink()
    (newer / "trainer.json").symlink_to("/proc/self/mem")
    manifest = json.loads((newer / "manifest.json").read_text())
    manifest["files"]["trainer.json"]["bytes"] = 0
    (newer / "manifest.json").write_text(json.dumps(manifest))
    problem = "trainer.json: cannot be read (Input/output error)."
    assert manifest_problems(newer) == [problem]
    assert newest_checkpoint(tmp_path) == good
    (said,) = (record.message for record in caplog.records)
    assert said == f"checkpoint {newer} is skipped: {problem}"


def test_an_interrupted_write_leaves_the_older_checkpoint_and_is_cleaned_up(tmp_path: Path) -> None:
    good = save(tmp_path / "step_00000007")
    (tmp_path / "step_00000014.partial").mkdir()
    assert newest_checkpoint(tmp_path) == good
    remove_old_checkpoints(tmp_path, keep=2, newest=good)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000007"]


def test_a_checkpoint_that_is_written_again_stays_until_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, removed = save(tmp_path / "step_00000007"), []
    rmtree = shutil.rmtree

    def remove(path: Path, *, ignore_errors: bool) -> None:
        assert not manifest_problems(folder)
        removed.append(path.name)
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove)
    before = folder.stat().st_ino
    save(folder)
    assert folder.stat().st_ino != before
    assert folder.name not in removed
    assert list(tmp_path.iterdir()) == [folder]


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


@pytest.mark.slow
@pytest.mark.processes
def test_a_kill_at_any_moment_of_a_save_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """kill -9 at seven moments of a writer that saves one checkpoint after the other."""
    program = [sys.executable, "-c", _WRITERS, str(tmp_path)]
    subprocess.run(program, env=rank_env(), cwd=REPO, check=True, timeout=DEADLINE_S)
    assert len(list(tmp_path.iterdir())) == 7
    for folder in tmp_path.iterdir():
        found = checkpoint_folders(folder)
        assert found
        assert [problem for path in found for problem in manifest_problems(path)] == []


# The writers are forks of one process, which loads torch once for all of them.
_WRITERS = """
import os, signal, sys, time
from pathlib import Path
from payload.train.checkpoints.saving import Saving
from payload.train.checkpoints.snapshot import Snapshot
from tests.train.test_checkpoint import STATE, model_of, trained_optimizers

def write_without_end(folder, first_written):
    saving = Saving(folder, keep=3, tokenizer={}, waiting=lambda: None)
    for step in range(1, 1_000_000):
        model, tensors = optimizers.model, optimizers.state_tensors()
        saving.begin(
            folder / f"step_{step:08d}",
            model=model,
            snapshot=Snapshot.of(model, tensors),
            state=STATE,
        )
        if step == 2:
            os.write(first_written, b"!")

optimizers = trained_optimizers()
for attempt in range(7):
    told, first_written = os.pipe()
    writer = os.fork()
    if not writer:
        write_without_end(Path(sys.argv[1], str(attempt)), first_written)
    os.close(first_written)
    assert os.read(told, 1) == b"!"
    time.sleep(0.007 * attempt)
    os.kill(writer, signal.SIGKILL)
    assert os.waitpid(writer, 0) == (writer, signal.SIGKILL)
"""


def test_a_disk_that_refuses_is_one_clear_error_and_nothing_half_written(tmp_path: Path) -> None:
    """A limit on file size simulates a full disk: the kernel refuses the write."""
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


@pytest.mark.parametrize(
    "change",
    [
        {"step": "7"},
        {"step": -1},
        {"step": None},
        {"step": 10**30},
        {"next_sample": 1.5},
        {"tokens": True},
        {"dtype": ""},
        {"dtype": "fp64"},
        {"wall_s": "x"},
        {"wall_s": -1},
        {"world_size": 0},
        {"tokenizer": []},
        {"tokenizer": {"name": 7}},
        {"versions": "x"},
        {"config_toml": {}},
        {"schema_version": True},
    ],
)
def test_hostile_values_in_trainer_json_are_one_error(
    tmp_path: Path, change: dict[str, object]
) -> None:
    folder = save(tmp_path / "step_00000007")
    raw = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps(raw | change))
    with pytest.raises(CheckpointError, match=r"trainer\.json") as raised:
        load_trainer_state(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff", b"[" * 20_000, b"9" * 4300, b"Infinity", b'{"a": 1e999}']
)
def test_a_damaged_trainer_json_is_one_error(tmp_path: Path, content: bytes) -> None:
    folder = save(tmp_path / "step_00000007")
    (folder / "trainer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        load_trainer_state(folder)
