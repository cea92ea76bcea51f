"""Readers of a run's files, for tests of strategies."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from payload.results import RunPaths
from tests.support.launching import metrics

FILES = ("model.safetensors", "optimizer.safetensors")


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
