"""The built site, and a browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, leave_out_without_browser
from tests.support.launching import REPO


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that open pages if no browser is installed."""
    leave_out_without_browser(config, items, folder="tests/docs")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Headless Chromium, shared by all tests."""
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make site` builds it."""
    folder = tmp_path_factory.mktemp("site")
    build_site(REPO / "docs", folder)
    return folder


def build_site(docs: Path, folder: Path) -> None:
    """Build the pages of `docs` into `folder`. Raises CalledProcessError for a warning."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet", "-b", "html"]
    subprocess.run([*command, str(docs), str(folder)], check=True, capture_output=True, text=True)
