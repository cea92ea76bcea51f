"""Runs of strategies for tests, and comparisons of two of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.architecture_cases import CASES, make_folder
from payload.results import RunPaths
from tests.support.launching import (
    REPO,
    evaluations,
    losses,
    metrics,
    mpirun,
    rank_env,
    run,
    summary,
    train_program,
    train_several,
)
from tests.train.alone import forget_accelerate, train_alone
from tests.train.strategies.deepspeed_folder import deepspeed_folder

FILES = ("model.safetensors", "optimizer.safetensors")
STEPS = ("schedule.warmup_steps=0", "train.steps=6", "train.checkpoint_every=3")
SIZES = tuple(f"model.{name}=none" for name in ("n_layer", "n_head", "n_embd"))
"""For weights of `model.init`, which have their own."""
ZERO3 = "distributed.strategy=zero3"

# A bit flips in what one rank holds, as broken RAM would do it.
_SPOIL = """
import os, sys
import torch
from payload.train import trainer
from payload.train.__main__ import main

step = trainer.Trainer._train_step

def spoiled(self):
    stopping = step(self)
    if self._parts.world.rank == {rank} and self._step == 2:
        with torch.no_grad():
            self._parts.optimizers.trained()["{parameter}"].view(-1)[5] += 1e-6
    return stopping

trainer.Trainer._train_step = spoiled
sys.exit(main(sys.argv[1:], os.environ))
"""


def train_ranks(folder: Path, config: Path, *overrides: str, num_ranks: int) -> str:
    """Train through mpirun, under zero3 too, and return what was said.

    DeepSpeed is not in the environment of the tests.
    """
    env = rank_env()
    if ZERO3 in overrides:
        env["PYTHONPATH"] = os.pathsep.join((str(REPO), str(deepspeed_folder())))
    result = run(mpirun(num_ranks, *train_program(folder, config, *overrides)), env=env)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stderr + result.stdout


def train_decoders(
    root: Path,
    config: Path,
    way: str,
    cases: Sequence[tuple[str, tuple[str, ...]]],
    **sizes: int,
) -> None:
    """Train each case, a decoder's name and overrides, on one rank and on two, the way given.

    The runs of case 0 are `root / "0" / "alone"` and `root / "0" / "two"`.
    """
    of_two: dict[Path, tuple[str, ...]] = {}
    for place, (name, extra) in enumerate(cases):
        folder = root / str(place)
        make_folder({**CASES[name], **sizes}, folder / "base")
        words = (*STEPS, *SIZES, f"model.init={folder / 'base'}", "optimizer.lr=1e-4", *extra)
        train_alone(folder / "alone", config, *words)
        forget_accelerate()
        of_two[folder / "two"] = (way, *words)
    train_several(of_two, config, num_ranks=2)


def require_same_decoder(folder: Path, extra: Sequence[str]) -> None:
    """Require two ranks' run to be one rank's."""
    two, alone = folder / "two", folder / "alone"
    close = 1e-4 if "precision.dtype=bf16" in extra else 1e-6
    assert losses(two) == pytest.approx(losses(alone), rel=close)
    assert norms(two) == pytest.approx(norms(alone), rel=close * 300)
    assert len(losses(two)) == 6
    assert summary(two)["ranks_identical"] is True


def norms(run_dir: Path) -> list[float]:
    """Gradient norms of a run, by step."""
    return [row["grad_norm"] for row in metrics(run_dir) if "loss" in row]


def first_half(whole: Path, folder: Path) -> Path:
    """A copy of the run that has only its checkpoint of step 3."""
    shutil.copytree(whole, folder)
    shutil.rmtree(RunPaths(folder).checkpoint(6))
    return folder


def tensors(run_dir: Path, *, step: int) -> dict[str, Tensor]:
    """The weights and the optimizer state of a checkpoint."""
    checkpoint = RunPaths(run_dir).checkpoint(step)
    return {
        f"{file}: {name}": each
        for file in FILES
        for name, each in load_file(checkpoint / file).items()
    }


def require_equal_runs(ours: Path, theirs: Path) -> None:
    """Require the losses, evaluations and norms of another run, within rounding."""
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-6)
    assert evaluations(ours) == pytest.approx(evaluations(theirs), rel=1e-6)
    assert norms(ours) == pytest.approx(norms(theirs), rel=1e-5)
    assert summary(ours)["ranks_identical"] is True


def require_same_layout(ours: Path, theirs: Path) -> None:
    """Require the checkpoints of two runs to have tensors of the same names, sizes and dtypes."""
    found, wanted = tensors(ours, step=6), tensors(theirs, step=6)
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (each.shape, each.dtype) for name, each in wanted.items()
    }


def require_bitwise_resume(
    whole: Path, folder: Path, config: Path, *overrides: str, num_ranks: int
) -> None:
    """Resume a copy of the run from step 3 in `folder`; require its losses and bits.

    Each rank has to read its own part of the optimizer state.
    """
    half = first_half(whole, folder)
    said = train_ranks(half, config, *overrides, num_ranks=num_ranks)
    assert "each rank reads its own part of the state" in said
    assert losses(half) == losses(whole)
    ours, theirs = tensors(half, step=6), tensors(whole, step=6)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(each, theirs[name]) for name, each in ours.items())


def error_of_spoiled(
    folder: Path, config: Path, *overrides: str, num_ranks: int, rank: int, parameter: str
) -> str:
    """Train in `folder / "run"` with a bit flipped on one rank after step 2; return the error."""
    program = folder / "spoil.py"
    program.write_text(_SPOIL.format(rank=rank, parameter=parameter), encoding="utf-8")
    words = train_program(folder / "run", config, *overrides)[2:]
    result = run(mpirun(num_ranks, str(program), *words), env=rank_env())
    assert result.returncode == 40, result.stderr
    assert not (folder / "run" / "checkpoints").exists()
    record = json.loads((folder / "run" / "exits" / "rank_0000.json").read_text())
    return str(record["error"])
