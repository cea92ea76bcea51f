"""The kernels' library, built once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

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
