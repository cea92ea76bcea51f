"""Muon beside AdamW: the validation loss that Muon reaches in three quarters of AdamW's steps.

    python -m benchmarks.optimizer --data data/stdlib --out runs/optimizer

Trains with the real trainer in one small setting (`SETTING`: 16 layers of width 128, 10M
parameters). AdamW takes N steps, Muon three quarters of them. Each run has its own cosine that ends
at its last step, as in real runs. Learning rates are tried on the first seed, by factors of two,
until those at both ends are clearly worse than the best (`CLEARLY`); the other seeds use the best.
A seed determines the weights and the order of the data; both optimizers use the same seeds.

Finished runs stay in the folder and are not repeated, so the same command continues an interrupted
comparison; `--runs 2` stops after two runs. Two runs train at a time, each with half of the cores,
which is faster at this size. A table goes to stderr, one JSON object to stdout; the exit status is
1 if Muon missed AdamW's mean loss, 3 if runs are missing.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import Benchmark
from payload.config.run_config import RunConfig, parse_run_config
from payload.launch.environment import malloc_environment
from payload.models.gpt2.spec import Gpt2Spec
from payload.run_record.run_files import RunPaths, Summary, read_json

Name = Literal["adamw", "muon"]

SETTING: dict[str, Any] = {
    "data.sequence_length": 256,
    "model.n_layer": 16,
    "model.n_head": 4,
    "model.n_embd": 128,
    "batch.global_batch_size": 8,
    "batch.micro_batch_size": 8,
    "train.eval_every": 0,
    "train.eval_tokens": 32768,
    "train.checkpoint_every": 0,
    "train.sync_check_every": 0,
    "precision.dtype": "bf16",
}
"""Settings of all runs."""
STEPS = 128
"""Number of steps of a run with AdamW."""
SHARE = 0.75
"""Number of steps of a run with Muon, as a share of `STEPS`."""
WARM_UP = 0.1
"""Steps of the warm-up as a share of a run's steps."""
LAST_LR = 0.1
"""Learning rate at the end of the cosine, as a share of the highest learning rate."""
SEEDS = (1, 2, 3)
JOBS = 2
"""Number of runs that train at the same time."""
FIRST_LRS = (2e-3, 1e-3, 4e-3)
CLEARLY = 1.02
"""A learning rate is clearly worse if its loss exceeds the best loss by this factor. Losses of
different seeds differ by about as much."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One training run."""

    name: Name
    lr: float
    seed: int
    steps: int

    def folder_name(self) -> str:
        """Return the trial's folder name, which is unique."""
        return f"{self.name}_lr{self.lr:g}_seed{self.seed}_steps{self.steps}"

    @classmethod
    def of_folder(cls, name: str) -> Trial:
        """Return the trial with this folder name."""
        optimizer, lr, seed, steps = name.split("_")
        known: Name = "muon" if optimizer == "muon" else "adamw"
        return cls(known, float(lr[2:]), int(seed[4:]), int(steps[5:]))

    def config(self, data: Path) -> RunConfig:
        """Return the run's config."""
        settings = SETTING | {
            "data.dir": data,
            "run.name": self.name,
            "run.seed": self.seed,
            "optimizer.name": self.name,
            "optimizer.lr": self.lr,
            "optimizer.min_lr": self.lr * LAST_LR,
            "schedule.warmup_steps": round(self.steps * WARM_UP),
            "train.steps": self.steps,
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        return parse_run_config("", overrides=overrides, where="benchmark")


def main(argv: Sequence[str]) -> int:
    """Train the missing runs and compare; return the exit status."""
    benchmark = Benchmark("optimizer", __doc__)
    add = benchmark.parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="prepared stdlib")
    add("--out", type=Path, required=True, metavar="DIR", help="folder that keeps finished runs")
    add("--steps", type=int, default=STEPS, help="steps of AdamW (default: %(default)s)")
    add("--runs", type=int, metavar="COUNT", help="stop after this many new runs (default: none)")
    arguments = benchmark.parse(argv)
    steps: dict[Name, int] = {"adamw": arguments.steps, "muon": round(arguments.steps * SHARE)}
    folder = Folder(arguments.out.resolve(), arguments.data.resolve())
    left, done = arguments.runs, folder.finished()
    while trials := _alternating(missing(name, steps[name], done) for name in steps):
        if left == 0:
            print(f"{len(trials)} or more runs are missing", file=sys.stderr)
            return 3
        now = trials[: min(JOBS, len(trials) if left is None else left)]
        left = None if left is None else left - len(now)
        with ThreadPoolExecutor(JOBS) as pool:
            done |= dict(zip(now, pool.map(folder.train, now), strict=True))
    found = {name: compared(name, count, done) for name, count in steps.items()}
    result = summarise(found)
    _add_tables(benchmark, found)
    benchmark.finish(result)
    return 0 if result["reached"] else 1


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of one trial."""

    loss: float
    """Validation loss at the end."""
    wall_s: float


class Folder:
    """Trains the runs and keeps them."""

    def __init__(self, out: Path, data: Path) -> None:
        self._out, self._data = out, data

    def finished(self) -> dict[Trial, Trained]:
        """Return the finished trials. Raises SystemExit for a run with other settings."""
        found = {}
        for paths in map(RunPaths, sorted(self._out.glob("*_lr*_seed*_steps*"))):
            summary = read_json(Summary, paths.summary)
            if summary is not None and summary.status == "finished":
                trial = Trial.of_folder(paths.root.name)
                if paths.config.read_text(encoding="utf-8") != self._config(trial):
                    raise SystemExit(f"error: {paths.root} has other settings. Name another --out.")
                found[trial] = _result(summary)
        return found

    def train(self, trial: Trial) -> Trained:
        """Train the trial's run, or resume it. Raises CalledProcessError."""
        paths = RunPaths(self._out / trial.folder_name())
        paths.root.mkdir(parents=True, exist_ok=True)
        paths.config.write_text(self._config(trial), encoding="utf-8")
        print(f"training {paths.root.name}", file=sys.stderr)
        threads = max(1, (os.cpu_count() or 1) // JOBS)
        with (paths.root / "log").open("a", encoding="utf-8") as log:
            subprocess.run(
                [
                    *(sys.executable, "-m", "payload.train", "--run-dir", str(paths.root)),
                    *("--set", f"data.dir={self._data}"),
                ],
                env=os.environ | malloc_environment("tuned") | {"OMP_NUM_THREADS": str(threads)},
                stderr=log,
                check=True,
            )
        # 12 bytes a parameter that nothing reads.
        shutil.rmtree(paths.checkpoints)
        summary = read_json(Summary, paths.summary)
        assert summary is not None, "a successful run has a summary"
        return _result(summary)

    def _config(self, trial: Trial) -> str:
        return trial.config(self._data).to_toml()


def _result(summary: Summary) -> Trained:
    assert summary.final_val_loss is not None, "a finished run ends with an evaluation"
    return Trained(summary.final_val_loss, summary.wall_s)


def missing(name: Name, steps: int, done: Mapping[Trial, Trained]) -> list[Trial]:
    """Return the trials to train next; empty if the best learning rate has all its seeds."""
    first = [Trial(name, lr, SEEDS[0], steps) for lr in FIRST_LRS]
    untrained = [trial for trial in first if trial not in done]
    if untrained:
        return untrained
    grid = _grid(name, steps, done)
    best = min(grid, key=lambda trial: done[trial].loss)
    for end, factor in ((grid[0], 0.5), (grid[-1], 2.0)):
        if done[end].loss < done[best].loss * CLEARLY:
            return [replace(end, lr=end.lr * factor)]
    return [trial for seed in SEEDS if (trial := replace(best, seed=seed)) not in done]


def _alternating(lists: Iterable[list[Trial]]) -> list[Trial]:
    """Return the trials of both optimizers alternately, so that a partial comparison has both."""
    return [trial for turn in zip_longest(*lists) for trial in turn if trial is not None]


def _grid(name: Name, steps: int, done: Mapping[Trial, Trained]) -> list[Trial]:
    """Return the first seed's trials by ascending learning rate."""
    alike = [each for each in done if (each.name, each.seed, each.steps) == (name, SEEDS[0], steps)]
    return sorted(alike, key=lambda trial: trial.lr)


@dataclass(frozen=True, slots=True)
class Compared:
    """The runs of one optimizer."""

    grid: Mapping[Trial, Trained]
    """Results of all learning rates with the first seed, by ascending learning rate."""
    seeds: Mapping[Trial, Trained]
    """Results of the best learning rate with every seed."""

    def best(self) -> Trial:
        """Return the best of the grid."""
        return min(self.grid, key=lambda trial: self.grid[trial].loss)


def compared(name: Name, steps: int, done: Mapping[Trial, Trained]) -> Compared:
    """Return one optimizer's runs; `done` has all of them."""
    grid = {trial: done[trial] for trial in _grid(name, steps, done)}
    best = min(grid, key=lambda trial: grid[trial].loss)
    chosen = [replace(best, seed=seed) for seed in SEEDS]
    return Compared(grid, {trial: done[trial] for trial in chosen})


def summarise(found: Mapping[Name, Compared]) -> dict[str, object]:
    """Return the result; `reached` compares the means over the seeds."""
    losses = {name: [run.loss for run in each.seeds.values()] for name, each in found.items()}
    mean = {name: statistics.mean(each) for name, each in losses.items()}
    best = {name: each.best() for name, each in found.items()}
    pairs = list(zip(losses["muon"], losses["adamw"], strict=True))
    spec = Gpt2Spec(
        n_layer=SETTING["model.n_layer"],
        n_head=SETTING["model.n_head"],
        n_embd=SETTING["model.n_embd"],
        sequence_length=SETTING["data.sequence_length"],
    )
    return {
        "parameters": spec.num_params(),
        "hidden_matrix_parameters": spec.num_matrix_params(),
        "tokens_per_step": SETTING["batch.global_batch_size"] * SETTING["data.sequence_length"],
        "steps": {name: trial.steps for name, trial in best.items()},
        "lr": {name: trial.lr for name, trial in best.items()},
        "grid": {
            name: {f"{trial.lr:g}": round(run.loss, 4) for trial, run in each.grid.items()}
            for name, each in found.items()
        },
        "val_loss": {name: [round(loss, 4) for loss in each] for name, each in losses.items()},
        "mean_val_loss": {name: round(loss, 4) for name, loss in mean.items()},
        "reached": mean["muon"] <= mean["adamw"],
        "seeds": len(pairs),
        "seeds_that_reached": sum(muon <= adamw for muon, adamw in pairs),
        "wall_s": {
            name: round(statistics.mean(run.wall_s for run in each.seeds.values()), 1)
            for name, each in found.items()
        },
    }


def _add_tables(benchmark: Benchmark, found: Mapping[Name, Compared]) -> None:
    table = benchmark.table("lr", "loss", title="grid", labels=found)
    for name, each in found.items():
        for trial, run in each.grid.items():
            table.row(name, f"{trial.lr:g}", f"{run.loss:.4f}")
    seeds = max((len(each.seeds) for each in found.values()), default=0)
    heads = (f"loss {number + 1}" for number in range(seeds))
    table = benchmark.table("steps", "lr", *heads, title="seeds", labels=found)
    for name, each in found.items():
        losses = (f"{run.loss:.4f}" for run in each.seeds.values())
        chosen = each.best()
        table.row(name, str(chosen.steps), f"{chosen.lr:g}", *losses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
