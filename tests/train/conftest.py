"""The kernels' library, built once for each machine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from payload.kernels.build import built_library
from payload.kernels.library import Library

# From glibc's malloc.h. It fills memory with the lowest eight bits of the value's complement, or
# not at all if the value is 0.
_M_PERTURB, _ALL_ONES = -6, 0x100


@pytest.fixture(scope="session")
def built() -> Path:
    """Return the library's file in the trainer's own cache, where ranks of other tests build it."""
    return built_library(Path.home() / ".cache" / "tileforge" / "kernels")


@pytest.fixture(scope="session")
def library(built: Path) -> Library:
    """Return the loaded library."""
    return Library(built)


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill unwritten memory with NaN, so that reads of it are detected.

    Torch fills tensors only with deterministic operations, which other tests do not use;
    glibc fills the kernels' own memory.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fill_uninitialized_memory is on, unless turned off
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_PERTURB, _ALL_ONES) == 1
    yield
    assert libc.mallopt(_M_PERTURB, 0) == 1
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the number of threads of torch and the kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
