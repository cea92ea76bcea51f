"""Results that are read a step late, as on GPUs: they are the same, and none is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from payload.core.errors import TrainingError
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths
from payload.train import trainer
from payload.train.ranks.world import World
from payload.train.step_results import StepResults, begin_results
from tests.train.alone import ALONE, train_alone

TIMES = {
    *("time_unix", "step_time_s", "tokens_per_s", "mfu", "data_time_s", "sync_time_s"),
    *("rss_bytes", "ranks"),
}
RUN = (
    "train.steps=5",
    "train.checkpoint_every=3",
    "train.eval_every=2",
    "batch.micro_batch_size=1",
)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host continue while the device computes, as with a GPU."""
    monkeypatch.setattr(World, "queues_work", lambda _world: True)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the run's rows without what differs between equal runs."""
    found = read_metrics(RunPaths(folder).metrics)
    return [{key: value for key, value in row.items() if key not in TIMES} for row in found]


def weights(folder: Path, step: int) -> bytes:
    return (RunPaths(folder).checkpoint(step) / "model.safetensors").read_bytes()


def test_a_run_that_reads_results_late_is_the_same_run(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_alone(tmp_path / "at once", tiny_config, *RUN)
    monkeypatch.setattr(World, "queues_work", lambda _world: True)
    train_alone(tmp_path / "late", tiny_config, *RUN)
    assert rows(tmp_path / "late") == rows(tmp_path / "at once")
    timed = read_metrics(RunPaths(tmp_path / "late").metrics)
    assert all(row["step_time_s"] > 0 for row in timed if "loss" in row)
    for step in (3, 5):
        assert weights(tmp_path / "late", step) == weights(tmp_path / "at once", step)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("bad_step", [3, 4])
def test_a_loss_that_is_no_number_is_found_before_a_checkpoint(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch, bad_step: int
) -> None:
    begun = 0

    def begin(world: World, **parts: Any) -> Callable[[], StepResults]:
        nonlocal begun
        begun += 1
        found = begin_results(world, **parts)
        if begun != bad_step:
            return found
        return lambda: replace(found(), loss=float("nan"))

    monkeypatch.setattr(trainer, "begin_results", begin)
    with pytest.raises(TrainingError, match=f"step {bad_step}: loss nan"):
        train_alone(tmp_path, tiny_config, *RUN)
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [*range(1, bad_step)]
    saved = RunPaths(tmp_path).checkpoint(3).exists()
    assert saved == (bad_step > 3)


@pytest.mark.usefixtures("late")
def test_a_stop_request_is_read_late_and_every_step_is_recorded(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(world: World, **parts: Any) -> Callable[[], StepResults]:
        return begin_results(world, **{**parts, "stop_requested": True})

    monkeypatch.setattr(trainer, "begin_results", begin)
    stopped = train_alone(tmp_path, tiny_config, "train.steps=9", "train.eval_every=0")
    assert (stopped.step, stopped.stopped) == (2, True)
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2]
    assert RunPaths(tmp_path).checkpoint(2).exists()


@pytest.mark.usefixtures("late")
def test_the_profiler_starts_when_the_steps_before_are_complete(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []

    def profiled(_: Path, *, step: int, rank: int, **_more: Any) -> AbstractContextManager[None]:
        recorded.extend([step, rank, *(row["step"] for row in rows(tmp_path) if "loss" in row)])
        return nullcontext()

    monkeypatch.setattr(trainer, "profiled", profiled)
    settings = ("train.steps=4", "train.eval_every=0", "train.profile_step=3")
    train_alone(tmp_path, tiny_config, *settings)
    assert recorded == [3, 0, 1, 2]


def test_results_keep_their_parts() -> None:
    found = begin_results(
        ALONE,
        loss=torch.tensor(2.5, dtype=torch.float64),
        gradient_norm=torch.tensor(0.5),
        stop_requested=True,
        seconds=[1.0, 2.0],
        loss_sums=torch.tensor([3.0], dtype=torch.float64),
        expert_tokens=torch.zeros(0, dtype=torch.float64),
    )()
    assert (found.loss, found.gradient_norm, found.stop_requests) == (2.5, 0.5, 1.0)
    assert found.seconds == [1.0, 2.0] and found.loss_sums.tolist() == [3.0]
    assert not len(found.expert_tokens)
