"""The kernels' library, built once a machine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from payload.kernels.build import built_library
from payload.kernels.library import Library
from tests.train.alone import forget_accelerate

# Of glibc's malloc.h. It fills memory with the lowest eight bits of the value's complement, and
# with nothing when the value is 0.
_M_PERTURB, _ALL_ONES = -6, 0x100


@pytest.fixture(scope="session")
def built() -> Path:
    """The file, from the trainer's own cache, as ranks of other tests build it there."""
    return built_library(Path.home() / ".cache" / "tileforge" / "kernels")


@pytest.fixture(scope="session")
def library(built: Path) -> Library:
    """The library, loaded."""
    return Library(built)


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Memory that nobody has written to is NaN: whoever reads it is found out.

    Torch does so for tensors with its deterministic operations only, which other tests go without;
    for the kernels' own memory glibc does.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fill_uninitialized_memory is on, unless turned off
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_PERTURB, _ALL_ONES) == 1
    yield
    assert libc.mallopt(_M_PERTURB, 0) == 1
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def accelerate_forgets() -> Iterator[None]:
    """The tests train with several precisions."""
    yield
    forget_accelerate()


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads torch and the kernels have."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
