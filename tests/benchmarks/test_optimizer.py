"""How the optimizers' comparison chooses learning rates, and what it concludes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.optimizer import (
    SEEDS,
    Runner,
    RunsLeftError,
    Trained,
    Trial,
    Tuned,
    summarise,
    tune_and_repeat,
)


def _trainer(*, best_lr: float, loss: float) -> Callable[[Trial], Trained]:
    """Losses that rise with the distance from the best learning rate, and with the seed."""

    def train(trial: Trial) -> Trained:
        distance = math.log2(trial.lr / best_lr)
        return Trained(trial, loss + distance**2 + trial.seed / 100, wall_s=1.0)

    return train


@pytest.mark.parametrize("best_lr", [2e-3, 2.5e-4, 1.6e-2])
def test_learning_rates_are_tried_until_the_best_lies_between_two_worse(best_lr: float) -> None:
    tuned = tune_and_repeat("muon", 30, _trainer(best_lr=best_lr, loss=5.0))
    lrs = [each.trial.lr for each in tuned.grid]
    assert lrs == sorted(lrs)
    assert lrs.index(best_lr) not in (0, len(lrs) - 1)
    assert [each.trial for each in tuned.seeds] == [
        Trial("muon", best_lr, seed, 30) for seed in SEEDS
    ]


@pytest.mark.parametrize(("muon_loss", "reached"), [(4.9, True), (5.0, True), (5.1, False)])
def test_the_means_over_the_seeds_decide(muon_loss: float, reached: bool) -> None:
    found: dict[str, Tuned] = {
        "adamw": tune_and_repeat("adamw", 40, _trainer(best_lr=2e-3, loss=5.0)),
        "muon": tune_and_repeat("muon", 30, _trainer(best_lr=4e-3, loss=muon_loss)),
    }
    result = summarise({"adamw": found["adamw"], "muon": found["muon"]})
    assert result["reached"] is reached
    assert result["lr"] == {"adamw": 2e-3, "muon": 4e-3}
    assert result["steps"] == {"adamw": 40, "muon": 30}


def test_a_trial_ends_its_own_cosine_at_its_own_last_step() -> None:
    config = Trial("muon", 2e-3, 1, 30).config(Path("data"))
    assert (config.schedule.kind, config.decay_steps(), config.train.steps) == ("cosine", 30, 30)
    assert config.optimizer.min_lr == pytest.approx(2e-4)


def test_no_more_runs_are_made_than_were_asked_for(tmp_path: Path) -> None:
    runner = Runner(tmp_path, tmp_path, most=0)
    with pytest.raises(RunsLeftError):
        runner.loss(Trial("adamw", 2e-3, 1, 10))


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    trial = Trial("adamw", 2e-3, 1, 10)
    (tmp_path / trial.folder_name()).mkdir()
    (tmp_path / trial.folder_name() / "run.toml").write_text("[run]\nseed = 5\n")
    with pytest.raises(SystemExit, match="other settings"):
        Runner(tmp_path, tmp_path, most=None).loss(trial)
