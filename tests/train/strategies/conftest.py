"""The runs that the tests of strategies share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.strategies.runs import Runs


@pytest.fixture(scope="module", autouse=True)
def as_the_ranks_compute(one_thread: None) -> None:
    """Use one thread in this process, too."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Runs:
    """Every run of `cases.RUNS`."""
    return Runs(tmp_path_factory.mktemp("strategies"), tiny_config)
