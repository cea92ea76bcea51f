"""Muon against AdamW: the validation loss that AdamW reaches, in how many of its steps?

    python -m benchmarks.optimizer --data data/stdlib --out runs/optimizer

Trains the real trainer on one small setting (`SETTING`: 16 layers of width 128, 10M parameters).
AdamW takes N steps, Muon three quarters of them. Each run has a cosine of its own that ends where
it does, as a run that anyone keeps would: losses along one long schedule, before it has decayed,
are not what either optimizer reaches in so many steps. Learning rates are tried on the first seed,
by factors of two, until the best one has a worse one on both sides; the other seeds then use it.
A seed makes the weights and the order of the data, the same for both optimizers.

A finished run is kept in the folder and not made again, so the command can be stopped and given
again; `--runs 1` stops after one. A table goes to stderr, one JSON object to stdout; the exit
status is 1 when Muon missed the mean loss, 3 when runs are left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from benchmarks.machine import describe_machine
from payload.launch.environment import malloc_environment
from payload.model_shape import ModelShape
from payload.results import RunPaths, Summary, read_json
from payload.run_config import RunConfig, parse_run_config

Name = Literal["adamw", "muon"]

SETTING: dict[str, Any] = {
    "data.sequence_length": 256,
    "model.n_layer": 16,
    "model.n_head": 4,
    "model.n_embd": 128,
    "batch.global_batch_size": 8,
    "batch.micro_batch_size": 8,
    "train.eval_every": 0,
    "train.eval_tokens": 65536,
    "train.checkpoint_every": 0,
    "train.sync_check_every": 0,
    "precision.dtype": "bf16",
}
"""What all runs share."""
STEPS = 256
"""AdamW's N."""
SHARE = 0.75
"""Of them, what Muon has."""
WARM_UP = 0.1
"""Share of a run's steps."""
LAST_LR = 0.1
"""Share of the highest learning rate at the end of the cosine."""
SEEDS = (1, 2, 3)
FIRST_LRS: dict[Name, tuple[float, ...]] = {
    "adamw": (1e-3, 2e-3, 4e-3),
    "muon": (1e-3, 2e-3, 4e-3),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One training run."""

    name: Name
    lr: float
    seed: int
    steps: int

    def folder_name(self) -> str:
        """Unique among all that a comparison runs."""
        return f"{self.name}_lr{self.lr:g}_seed{self.seed}_steps{self.steps}"

    def config(self, data: Path) -> RunConfig:
        """The run's, whole."""
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
        words = [f"{key}={value}" for key, value in settings.items()]
        return parse_run_config("", overrides=words, where="benchmark")


class RunsLeftError(Exception):
    """As many runs were made as were asked for, and more are to come."""


def main(argv: Sequence[str]) -> int:
    """Make the runs that are missing, compare, print."""
    arguments = _parser().parse_args(argv)
    runner = Runner(arguments.out, arguments.data.resolve(), most=arguments.runs)
    steps: dict[Name, int] = {"adamw": arguments.steps, "muon": round(arguments.steps * SHARE)}
    try:
        found = {name: tune_and_repeat(name, count, runner.loss) for name, count in steps.items()}
    except RunsLeftError:
        print("more runs are left; give the same command again", file=sys.stderr)
        return 3
    result = summarise(found)
    _print_table(found)
    print(json.dumps(result))
    return 0 if result["reached"] else 1


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of one trial."""

    trial: Trial
    loss: float
    """Validation loss at the end."""
    wall_s: float


class Runner:
    """Makes trials, at most so many, and remembers in a folder what came of them."""

    def __init__(self, out: Path, data: Path, *, most: int | None) -> None:
        self._out, self._data, self._left = out.resolve(), data, most
        self._out.mkdir(parents=True, exist_ok=True)

    def loss(self, trial: Trial) -> Trained:
        """The trial's, from the folder or trained now. Raises RunsLeftError."""
        folder = self._out / trial.folder_name()
        paths, config = RunPaths(folder), trial.config(self._data).to_toml()
        made_by = paths.config.read_text(encoding="utf-8") if paths.config.exists() else config
        if made_by != config:
            raise SystemExit(
                f"error: {folder} was made with other settings; name another --out folder."
            )
        summary = read_json(Summary, paths.summary)
        if summary is None or summary.status != "finished":
            summary = self._train(paths, config)
        assert summary.final_val_loss is not None, "a finished run was evaluated at its end"
        return Trained(trial, summary.final_val_loss, summary.wall_s)

    def _train(self, paths: RunPaths, config: str) -> Summary:
        if self._left == 0:
            raise RunsLeftError
        self._left = None if self._left is None else self._left - 1
        paths.root.mkdir(exist_ok=True)
        paths.config.write_text(config, encoding="utf-8")
        print(f"training {paths.root.name}", file=sys.stderr)
        subprocess.run(
            [sys.executable, "-m", "payload.train", "--run-dir", str(paths.root)],
            env=os.environ | malloc_environment("tuned"),
            check=True,
        )
        # 12 bytes a parameter that nothing reads again.
        shutil.rmtree(paths.checkpoints)
        summary = read_json(Summary, paths.summary)
        assert summary is not None, "a run that ended well has one"
        return summary


@dataclass(frozen=True, slots=True)
class Tuned:
    """One optimizer's runs."""

    grid: tuple[Trained, ...]
    """All learning rates with the first seed, rising."""
    seeds: tuple[Trained, ...]
    """The best learning rate with every seed."""


def tune_and_repeat(name: Name, steps: int, train: Callable[[Trial], Trained]) -> Tuned:
    """Try learning rates until the best one lies between two worse ones, then all seeds."""
    lrs = sorted(FIRST_LRS[name])
    grid = [train(Trial(name, lr, SEEDS[0], steps)) for lr in lrs]
    while (wider := _wider(grid)) is not None:
        grid.append(train(Trial(name, wider, SEEDS[0], steps)))
        grid.sort(key=lambda each: each.trial.lr)
    best = min(grid, key=lambda each: each.loss)
    others = [train(Trial(name, best.trial.lr, seed, steps)) for seed in SEEDS[1:]]
    return Tuned(tuple(grid), (best, *others))


def _wider(grid: Sequence[Trained]) -> float | None:
    """The learning rate beyond the best one, when that is the lowest or the highest."""
    best = min(range(len(grid)), key=lambda i: grid[i].loss)
    if best == 0:
        return grid[0].trial.lr / 2
    if best == len(grid) - 1:
        return grid[-1].trial.lr * 2
    return None


def summarise(found: dict[Name, Tuned]) -> dict[str, object]:
    """What is printed; `reached` compares the means over the seeds."""
    mean = {
        name: statistics.mean(each.loss for each in tuned.seeds) for name, tuned in found.items()
    }
    pairs = list(zip(found["muon"].seeds, found["adamw"].seeds, strict=True))
    shape = ModelShape(
        n_layer=SETTING["model.n_layer"],
        n_head=SETTING["model.n_head"],
        n_embd=SETTING["model.n_embd"],
        sequence_length=SETTING["data.sequence_length"],
    )
    return {
        "benchmark": "optimizer",
        "parameters": shape.num_params(),
        "hidden_matrix_parameters": shape.num_matrix_params(),
        "tokens_per_step": SETTING["batch.global_batch_size"] * SETTING["data.sequence_length"],
        "steps": {name: tuned.seeds[0].trial.steps for name, tuned in found.items()},
        "lr": {name: tuned.seeds[0].trial.lr for name, tuned in found.items()},
        "grid": {
            name: {f"{each.trial.lr:g}": round(each.loss, 4) for each in tuned.grid}
            for name, tuned in found.items()
        },
        "val_loss": {
            name: {str(each.trial.seed): round(each.loss, 4) for each in tuned.seeds}
            for name, tuned in found.items()
        },
        "mean_val_loss": {name: round(loss, 4) for name, loss in mean.items()},
        "reached": mean["muon"] <= mean["adamw"],
        "seeds_that_reached": sum(muon.loss <= adamw.loss for muon, adamw in pairs),
        "seeds": len(pairs),
        "wall_s": {
            name: round(statistics.mean(each.wall_s for each in tuned.seeds), 1)
            for name, tuned in found.items()
        },
        "versions": {"torch": version("torch")},
        "machine": describe_machine(),
    }


def _print_table(found: dict[Name, Tuned]) -> None:
    for name, tuned in found.items():
        for each in tuned.grid:
            print(f"{name:<6} lr {each.trial.lr:<8g} loss {each.loss:.4f}", file=sys.stderr)
    for name, tuned in found.items():
        losses = "  ".join(f"{each.loss:.4f}" for each in tuned.seeds)
        chosen = tuned.seeds[0].trial
        print(f"{name:<6} {chosen.steps} steps at {chosen.lr:g}: {losses}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer", description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="stdlib, prepared")
    add("--out", type=Path, required=True, metavar="DIR", help="folder that keeps finished runs")
    add("--steps", type=int, default=STEPS, help="of AdamW (default: %(default)s)")
    add("--runs", type=int, metavar="COUNT", help="stop after so many new runs (default: none)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
