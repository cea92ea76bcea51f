"""The runs that the optimizers' comparison chooses, and its result."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.optimizer import SEEDS, Folder, Name, Trained, Trial, compared, missing, summarise
from payload.run_record.run_files import RunPaths, Summary, write_json


def _all_made(name: Name, steps: int, *, best_lr: float, loss: float) -> dict[Trial, Trained]:
    """Return all requested runs; losses grow with the seed and the distance to the best rate."""
    done: dict[Trial, Trained] = {}
    while wanted := missing(name, steps, done):
        for trial in wanted:
            distance = math.log2(trial.lr / best_lr)
            done[trial] = Trained(loss + distance**2 + trial.seed / 100, wall_s=1.0)
    return done


@pytest.mark.parametrize("best_lr", [4e-3, 2.5e-4, 3.2e-2])
def test_learning_rates_are_tried_until_the_best_lies_between_two_worse(best_lr: float) -> None:
    done = _all_made("muon", 30, best_lr=best_lr, loss=5.0)
    found = compared("muon", 30, done)
    lrs = [trial.lr for trial in found.grid]
    assert lrs == sorted(lrs)
    assert lrs.index(best_lr) not in (0, len(lrs) - 1)
    assert list(found.seeds) == [Trial("muon", best_lr, seed, 30) for seed in SEEDS]


def test_runs_of_another_length_or_optimizer_are_not_taken_for_these() -> None:
    done = _all_made("adamw", 40, best_lr=4e-3, loss=5.0)
    assert missing("adamw", 30, done) == missing("adamw", 30, {})
    assert missing("muon", 40, done) == missing("muon", 40, {})


@pytest.mark.parametrize(("muon_loss", "reached"), [(4.9, True), (5.0, True), (5.1, False)])
def test_the_means_over_the_seeds_decide(muon_loss: float, reached: bool) -> None:
    done = _all_made("adamw", 40, best_lr=4e-3, loss=5.0)
    done |= _all_made("muon", 30, best_lr=2e-3, loss=muon_loss)
    result = summarise({"adamw": compared("adamw", 40, done), "muon": compared("muon", 30, done)})
    assert result["reached"] is reached
    assert result["lr"] == {"adamw": 4e-3, "muon": 2e-3}
    assert result["steps"] == {"adamw": 40, "muon": 30}


def test_a_trial_ends_its_own_cosine_at_its_own_last_step() -> None:
    config = Trial("muon", 2e-3, 1, 30).config(Path("data"))
    assert (config.schedule.kind, config.decay_steps(), config.train.steps) == ("cosine", 30, 30)
    assert config.optimizer.min_lr == pytest.approx(2e-4)


def _finished_run(out: Path, trial: Trial, *, data: Path) -> None:
    paths = RunPaths(out / trial.folder_name())
    paths.root.mkdir()
    paths.config.write_text(trial.config(data).to_toml(), encoding="utf-8")
    summary = Summary(
        run_id="run",
        status="finished",
        exit_class="ok",
        world_size=1,
        nodes=1,
        final_val_loss=4.5,
        wall_s=2.0,
    )
    write_json(paths.summary, summary)


def test_finished_runs_are_found_again_and_those_of_other_settings_refused(tmp_path: Path) -> None:
    trial = Trial("adamw", 2.5e-4, 3, 10)
    _finished_run(tmp_path, trial, data=Path("here"))
    assert Folder(tmp_path, Path("here")).finished() == {trial: Trained(4.5, 2.0)}
    with pytest.raises(SystemExit, match="other settings"):
        Folder(tmp_path, Path("elsewhere")).finished()
