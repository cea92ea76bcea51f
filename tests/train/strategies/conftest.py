"""Runs that several files of tests compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.alone import train_alone
from tests.train.strategies.runs import STEPS, train_ranks


@pytest.fixture(scope="module", autouse=True)
def as_the_ranks_compute(one_thread: None) -> None:
    """Take one thread in this process, too."""


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """The run of one rank, which holds everything; not to be changed."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_alone(folder, tiny_config, *STEPS)
    return folder


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """The same on two ranks with a half of the model each; not to be changed."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    train_ranks(folder, tiny_config, "distributed.strategy=shard", *STEPS, num_ranks=2)
    return folder
