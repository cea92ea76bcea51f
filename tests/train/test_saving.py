"""Checkpoints that are written during training."""

from __future__ import annotations

import math
import resource
import signal
import threading
from collections import UserDict
from collections.abc import ItemsView, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from payload.config.run_config import load_run_config
from payload.core.errors import TrainingError
from payload.formats.checkpoint_listing import (
    checkpoint_folders,
    checkpoint_step,
    manifest_problems,
)
from payload.run_record.metrics_log import EvalMetrics, read_metrics
from payload.run_record.run_files import RunPaths, Summary, read_json
from payload.run_record.run_repair import move_blockers_aside
from payload.train.checkpoints import checkpoint
from payload.train.checkpoints.checkpoint import newest_checkpoint, optimizer_tensors
from payload.train.checkpoints.saving import Saving
from payload.train.checkpoints.snapshot import Snapshot
from payload.train.optimizers.optimizer import Optimizers
from payload.train.session import train
from payload.train.start_clock import StartClock
from payload.train.tasks import text
from tests.support.waiting import DEADLINE_S
from tests.train.alone import ALONE, train_alone
from tests.train.test_checkpoint import STATE, model_of, trained_optimizers


class Gated(UserDict[str, Tensor]):
    """Tensors whose reads block until the gate is open, as if earlier reads were slow."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.gate = threading.Event()

    def items(self) -> ItemsView[str, Tensor]:
        assert self.gate.wait(DEADLINE_S)
        return super().items()


def begin(
    saving: Saving,
    folder: Path,
    optimizers: Optimizers,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    saving.begin(
        folder,
        model=model_of(optimizers),
        snapshot=Snapshot.of(
            model_of(optimizers),
            optimizers.state_tensors() if tensors is None else tensors,
        ),
        state=replace(STATE, step=int(folder.name[-8:])),
    )


@contextmanager
def full_disk() -> Iterator[None]:
    """Simulate a full disk by a limit on file size: the kernel refuses the write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_update_waits_until_the_tensors_are_read_and_changes_nothing_in_the_file(
    tmp_path: Path,
) -> None:
    optimizers, waits = trained_optimizers(), threading.Event()
    before = {name: value.clone() for name, value in optimizers.state_tensors().items()}
    gated = Gated(optimizers.state_tensors())
    saving = Saving(tmp_path, keep=2, tokenizer={}, waiting=waits.set)
    begin(saving, tmp_path / "step_00000007", optimizers, gated)

    def update() -> None:
        saving.before_update()
        for value in gated.values():
            value.zero_()

    updating = threading.Thread(target=update)
    updating.start()
    assert waits.wait(DEADLINE_S)
    assert all(torch.equal(gated[name], before[name]) for name in before)
    gated.gate.set()
    updating.join(DEADLINE_S)
    saving.finish()
    assert not any(value.any() for value in gated.values())
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000007"
    written = optimizer_tensors(tmp_path / "step_00000007")
    assert all(torch.equal(written[name], before[name]) for name in before)


def test_an_update_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_is_done, flush = threading.Event(), checkpoint._flush

    def slow_flush(path: Path) -> None:
        assert disk_is_done.wait(DEADLINE_S)
        flush(path)

    monkeypatch.setattr(checkpoint, "_flush", slow_flush)
    saving = Saving(tmp_path, keep=2, tokenizer={}, waiting=lambda: None)
    begin(saving, tmp_path / "step_00000007", trained_optimizers())
    saving.before_update()
    assert newest_checkpoint(tmp_path) is None
    disk_is_done.set()
    saving.finish()
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000007"


def test_the_next_checkpoint_waits_for_the_one_before_it(tmp_path: Path) -> None:
    optimizers = trained_optimizers()
    saving = Saving(tmp_path, keep=2, tokenizer={}, waiting=lambda: None)
    for step in (7, 8, 9):
        gated = Gated(optimizers.state_tensors())
        begin(saving, tmp_path / f"step_{step:08d}", optimizers, gated)
        kept = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".partial")
        assert kept == [f"step_{each:08d}" for each in range(max(7, step - 2), step)]
        gated.gate.set()
    saving.finish()
    assert not manifest_problems(tmp_path / "step_00000009")


def test_a_write_that_failed_is_an_error_of_whatever_comes_next(tmp_path: Path) -> None:
    optimizers = trained_optimizers()
    saving = Saving(tmp_path, keep=2, tokenizer={}, waiting=lambda: None)
    begin(saving, tmp_path / "step_00000007", optimizers)
    saving.finish()
    with full_disk():
        begin(saving, tmp_path / "step_00000014", optimizers)
        for come_next in (saving.before_update, saving.finish):
            with pytest.raises(TrainingError, match=r"step_00000014: cannot be written .* Free"):
                come_next()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000007"]
    assert not manifest_problems(tmp_path / "step_00000007")


def test_a_run_ends_with_the_error_of_a_checkpoint_that_could_not_be_written(
    tmp_path: Path, tiny_config: Path
) -> None:
    config = load_run_config(
        tiny_config, overrides=["train.steps=3", "train.checkpoint_every=1", "model.n_embd=64"]
    )
    with full_disk(), pytest.raises(TrainingError, match=r"step_00000001: cannot be written"):
        train(
            config,
            paths=RunPaths(tmp_path),
            world=ALONE,
            stop_requested=lambda: False,
            clock=StartClock(),
        )
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_best_checkpoint_is_kept_linked_and_named_and_a_resume_starts_from_the_newest(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {1: 4.0, 2: 2.0, 3: 3.0, 4: 5.0, 5: 6.0, 6: 1.0}
    monkeypatch.setattr(
        text,
        "evaluate",
        lambda _model, _blocks, how, _loss: EvalMetrics(
            step=how.step, val_loss=losses.get(how.step, 9.0), val_tokens=1
        ),
    )
    paths = RunPaths(tmp_path / "run")
    every = ("train.checkpoint_every=1", "train.eval_every=1", "train.keep_checkpoints=1")
    for steps, best in ((1, 1), (2, 2), (4, 2), (6, 6)):
        train_alone(paths.root, tiny_config, *every, f"train.steps={steps}")
        found = {checkpoint_step(folder) for folder in checkpoint_folders(paths.checkpoints)}
        # In addition, at most the checkpoint that was the best at the end of the last save.
        assert {best, steps} <= found and len(found) <= 2
        assert (paths.checkpoints / "best").resolve() == paths.checkpoint(best).resolve()
        assert not manifest_problems(paths.checkpoints / "best")
        summary = read_json(Summary, paths.summary)
        assert summary is not None and summary.best_checkpoint == paths.checkpoint(best).name
        assert newest_checkpoint(paths.checkpoints) == paths.checkpoint(steps)
    trained = [row["step"] for row in read_metrics(paths.metrics) if "loss" in row]
    assert trained == [1, 2, 3, 4, 5, 6]


def test_a_validation_loss_that_is_no_number_ends_the_run_and_costs_no_checkpoint(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {1: 4.0, 2: float("nan")}
    monkeypatch.setattr(
        text,
        "evaluate",
        lambda _model, _blocks, how, _loss: EvalMetrics(
            step=how.step, val_loss=losses.get(how.step, 9.0), val_tokens=1
        ),
    )
    paths = RunPaths(tmp_path / "run")
    every = ("train.checkpoint_every=1", "train.eval_every=1", "train.keep_checkpoints=1")
    with pytest.raises(TrainingError, match=r"^step 2: validation loss nan\. Training diverged"):
        train_alone(paths.root, tiny_config, *every, "train.steps=3")
    assert (paths.checkpoints / "best").resolve() == paths.checkpoint(1).resolve()
    assert not manifest_problems(paths.checkpoint(1))
    assert "NaN" not in paths.metrics.read_text()


@pytest.mark.parametrize("damage", ["lost", pytest.param("behind a link", marks=pytest.mark.slow)])
def test_the_best_checkpoint_stays_when_the_metrics_are_lost_or_moved(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    losses = {1: 2.0}
    monkeypatch.setattr(
        text,
        "evaluate",
        lambda _model, _blocks, how, _loss: EvalMetrics(
            step=how.step, val_loss=losses.get(how.step, 9.0), val_tokens=1
        ),
    )
    paths, elsewhere = RunPaths(tmp_path / "run"), tmp_path / "metrics.jsonl"
    every = ("train.checkpoint_every=1", "train.eval_every=1", "train.keep_checkpoints=1")
    train_alone(paths.root, tiny_config, *every, "train.steps=2")
    paths.metrics.rename(elsewhere)
    before = elsewhere.read_text()
    if damage == "behind a link":
        paths.metrics.symlink_to(elsewhere)
    # A link to outside the run's folder is never followed, for writing or reading.
    assert len(move_blockers_aside(paths)) == (damage == "behind a link")
    for steps in (4, 5):
        train_alone(paths.root, tiny_config, *every, f"train.steps={steps}")
        assert (paths.checkpoints / "best").resolve() == paths.checkpoint(1).resolve()
        assert not manifest_problems(paths.checkpoint(1))
        summary = read_json(Summary, paths.summary)
        assert summary is not None and summary.best_checkpoint == paths.checkpoint(1).name
    trained = [row["step"] for row in read_metrics(paths.metrics) if "loss" in row]
    assert trained == [3, 4, 5]
    assert elsewhere.read_text() == before and not paths.metrics.is_symlink()


def test_the_log_names_the_checkpoints_that_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    saving = Saving(tmp_path, keep=1, tokenizer={}, waiting=lambda: None)
    for step in (1, 2):
        begin(saving, tmp_path / f"step_{step:08d}", trained_optimizers())
    saving.finish()
    first, second = [each for each in caplog.messages if ": checkpoint " in each]
    assert first.endswith(str(tmp_path / "step_00000001"))
    assert second.endswith("; removed step_00000001 (train.keep_checkpoints = 1)")
    assert [each.name for each in checkpoint_folders(tmp_path)] == ["step_00000002"]


def test_an_evaluation_that_ends_while_a_checkpoint_is_written_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, keep=2, tokenizer={}, val_losses={1: 1.0}, waiting=lambda: None)
    real = math.isfinite

    def isfinite(value: float) -> bool:
        if threading.current_thread().name == "checkpoint":
            saving.evaluated(len(saving._val_losses) + 1, val_loss=2.0)
        return real(value)

    monkeypatch.setattr(math, "isfinite", isfinite)
    begin(saving, tmp_path / "step_00000001", trained_optimizers())
    saving.finish()
    assert len(checkpoint_folders(tmp_path)) == 1


def test_a_rank_that_fails_makes_the_checkpoint_under_way_whole(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is slow: the write is complete when a wait for the checkpoint ends."""
    waited_for, flush, finish = threading.Event(), checkpoint._flush, Saving.finish

    def slow_flush(path: Path) -> None:
        assert waited_for.wait(DEADLINE_S)
        flush(path)

    def wait(self: Saving) -> None:
        if self._write is not None:
            waited_for.set()
        finish(self)

    monkeypatch.setattr(checkpoint, "_flush", slow_flush)
    monkeypatch.setattr(Saving, "finish", wait)
    diverging = ["optimizer.lr=1e6", "optimizer.grad_clip=0", "schedule.warmup_steps=0"]
    saving = [*diverging, "train.steps=100", "train.checkpoint_every=1"]
    with pytest.raises(TrainingError, match=r"^step (\d+): loss .* Training diverged") as ended:
        train(
            load_run_config(tiny_config, overrides=saving),
            paths=RunPaths(tmp_path),
            world=ALONE,
            stop_requested=lambda: False,
            clock=StartClock(),
        )
    step = int(str(ended.value).split()[1].rstrip(":"))
    last = RunPaths(tmp_path).checkpoint(step - 1)
    assert newest_checkpoint(RunPaths(tmp_path).checkpoints) == last
