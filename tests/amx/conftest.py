"""Skips the AMX emulation, with a note, if it is not needed or not possible."""

from __future__ import annotations

import pytest

from tests.amx.emulation import Emulation, missing, prepare
from tests.support.left_out import leave_out


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that emulate tiles."""
    problem = missing()
    if problem:
        amx = [item for item in items if "tests/amx/" in item.nodeid]
        leave_out(config, items, amx, folder="tests/amx", why=f"that emulate AMX: {problem}.")


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    """Return the emulator, built for this session."""
    return prepare(tmp_path_factory.mktemp("emulation"))
