"""Fixtures that several folders share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_folders import make_data_folder
from tests.launching import TINY_RUN


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a vocabulary of 512."""
    return make_data_folder(tmp_path_factory.mktemp("data") / "tiny", vocab_size=512)


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """A run.toml that trains 20 steps in seconds."""
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(TINY_RUN.format(data=tiny_data), encoding="utf-8")
    return path
