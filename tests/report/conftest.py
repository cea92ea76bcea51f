"""A browser, and real runs with different ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.real_runs import make_failed_run, make_runs
from tests.support.browser import Browser, leave_out_without_browser


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that open pages if no browser is installed."""
    leave_out_without_browser(config, items)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Headless Chromium, shared by all tests."""
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with real runs: `stopped`, and `resumed`, which also lost a rank."""
    return make_runs(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="session")
def runs_and_failed(runs: Path) -> Path:
    """The same folder with a third run, `failed`."""
    make_failed_run(runs)
    return runs
