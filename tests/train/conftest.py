"""The kernels' library, built once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from payload.train.kernels.build import built_library
from payload.train.kernels.library import Library


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, from a cache of this session's own."""
    return built_library(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def library(built: Path) -> Library:
    """The library, loaded."""
    return Library(built)


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Tensors that torch leaves as memory has them are NaN: whoever reads one is found out.

    Torch does so with its deterministic operations only, which other tests go without.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fill_uninitialized_memory is on, unless turned off
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads torch and the kernels have."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
