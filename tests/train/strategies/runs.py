"""Trains the runs of `cases`, and compares two of them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from payload.run_record.run_files import RunPaths
from tests.support.accelerate_state import forget_accelerate
from tests.support.launching import (
    REPO,
    evaluations,
    losses,
    metrics,
    rank_env,
    summary,
    train_several,
)
from tests.train.alone import train_alone
from tests.train.strategies.cases import RUNS, STEPS, ZERO3, Case, is_slow, model_overrides
from tests.train.strategies.deepspeed_folder import deepspeed_folder

FILES = ("model.safetensors", "optimizer.safetensors")


class Runs:
    """The runs of `cases.RUNS`, each trained on its first request; not to be changed.

    All runs that can share the start of its ranks are trained together.
    """

    def __init__(self, root: Path, config: Path) -> None:
        self._root = root
        self._config = config
        self._models: dict[str, tuple[str, ...]] = {}
        self._alone: dict[tuple[str, tuple[str, ...]], Path] = {}
        self._outputs: dict[str, str] = {}
        self._failed: set[tuple[int, bool, str, bool, bool]] = set()

    def folder(self, name: str) -> Path:
        """Return the folder of a run."""
        self.output(name)
        return self._folder(name)

    def output(self, name: str) -> str:
        """Return the output of a run's ranks."""
        if name not in self._outputs:
            start = _start_of(_CASES[name])
            assert start not in self._failed, "these ranks failed before: see the first test"
            self._failed.add(start)
            self._train([each for each, case in _CASES.items() if _start_of(case) == start])
            self._failed.remove(start)
        return self._outputs[name]

    def alone(self, name: str) -> Path:
        """Return the folder of one rank's run of the same model and settings."""
        case = _CASES[name]
        key = (case.model, case.settings)
        if key not in self._alone:
            folder = self._root / f"alone-{len(self._alone)}"
            self.train_alone(folder, name)
            self._alone[key] = folder
        return self._alone[key]

    def train_alone(self, folder: Path, name: str) -> None:
        """Train a run, or the rest of it, on one rank in this process."""
        forget_accelerate()
        train_alone(folder, self._config, *self._settings(_CASES[name]))
        forget_accelerate()

    def resumed(self, name: str) -> Path:
        """Return the folder of the run that a run continues."""
        source = _CASES[name].resumes
        return self.alone(name) if source == "alone" else self.folder(source)

    def _train(self, names: Sequence[str]) -> None:
        """Train runs that share the start of their ranks."""
        folders = {name: self._folder(name) for name in names}
        for name, folder in folders.items():
            if _CASES[name].resumes:
                first_half(self.resumed(name), folder)
        ranks, zero3, isa, *_ = _start_of(_CASES[names[0]])
        env = rank_env() | ({"ONEDNN_MAX_CPU_ISA": isa} if isa else {})
        if zero3:  # The environment of the tests lacks DeepSpeed.
            env["PYTHONPATH"] = os.pathsep.join((str(REPO), str(deepspeed_folder())))
        outputs = train_several(
            {folders[name]: self._overrides(name) for name in names},
            self._config,
            num_ranks=ranks,
            env=env,
            spoiled={folders[name]: spoiled for name in names if (spoiled := _CASES[name].spoiled)},
        )
        self._outputs |= {name: outputs[folder] for name, folder in folders.items()}

    def _folder(self, name: str) -> Path:
        return self._root / re.sub(r"\W+", "-", name)

    def _overrides(self, name: str) -> tuple[str, ...]:
        return (*_CASES[name].strategy, *self._settings(_CASES[name]))

    def _settings(self, case: Case) -> tuple[str, ...]:
        if case.model not in self._models:
            folder = self._root / f"model-{len(self._models)}"
            self._models[case.model] = model_overrides(case.model, folder)
        return (*STEPS, *self._models[case.model], *case.settings)


_CASES: Mapping[str, Case] = {name: case for table in RUNS for name, case in table.items()}


def _start_of(case: Case) -> tuple[int, bool, str, bool, bool]:
    """Return a key: runs with equal keys share a start; resumed ones have other processes."""
    is_resumed = case.resumes not in ("", "alone")
    return case.ranks, ZERO3 in case.strategy, case.isa, is_resumed, is_slow(case)


def norms(run_dir: Path) -> list[float]:
    """Return the gradient norms of a run, by step."""
    return [row["grad_norm"] for row in metrics(run_dir) if "loss" in row]


def first_half(whole: Path, folder: Path) -> Path:
    """Copy a run with only its checkpoint of step 3."""
    shutil.copytree(whole, folder)
    shutil.rmtree(RunPaths(folder).checkpoint(6))
    return folder


def tensors(run_dir: Path, *, step: int) -> dict[str, Tensor]:
    """Return the weights and the optimizer state of a checkpoint."""
    checkpoint = RunPaths(run_dir).checkpoint(step)
    return {
        f"{file}: {name}": each
        for file in FILES
        for name, each in load_file(checkpoint / file).items()
    }


def require_equal_runs(ours: Path, theirs: Path) -> None:
    """Require losses, evaluations and norms equal to another run's, within rounding."""
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-6)
    assert evaluations(ours) == pytest.approx(evaluations(theirs), rel=1e-6)
    assert norms(ours) == pytest.approx(norms(theirs), rel=1e-5)
    assert summary(ours)["ranks_identical"] is True


def require_same_layout(ours: Path, theirs: Path) -> None:
    """Require that the checkpoints of two runs have tensors of equal names, sizes and dtypes."""
    found, wanted = tensors(ours, step=6), tensors(theirs, step=6)
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (each.shape, each.dtype) for name, each in wanted.items()
    }


def require_bitwise_equal(ours: Path, theirs: Path) -> None:
    """Require losses and checkpoints that are bitwise equal to another run's."""
    assert losses(ours) == losses(theirs)
    found, wanted = tensors(ours, step=6), tensors(theirs, step=6)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(each, wanted[name]) for name, each in found.items())
