"""`--stress PATH::TEST`: runs tests 50 times while other processes load every core.

A pytest plugin; tests/conftest.py registers it. Each round starts with fresh fixtures.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Generator

import pytest

ROUNDS = 50
_LOAD = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
"""Computes until its parent is gone, however that ends."""

_load = pytest.StashKey[list[subprocess.Popen[bytes]]]()


def add_options(parser: pytest.Parser) -> None:
    """Add the options. As a hook of this plugin it would run after they are parsed."""
    group = parser.getgroup("stress")
    group.addoption(
        "--stress",
        action="append",
        metavar="PATH::TEST",
        help=f"run this test {ROUNDS} times while other processes load every core, whatever -m is",
    )
    group.addoption("--stress-rounds", type=int, default=ROUNDS, metavar="N")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Collect these tests alone, and start the load."""
    wanted = config.getoption("stress")
    if not wanted:
        return
    config.args = [each.partition("[")[0] for each in wanted]
    config.option.markexpr = ""
    # pytest-xdist's workers have the same options; one load is enough.
    if not hasattr(config, "workerinput"):
        cores = range(os.cpu_count() or 1)
        config.stash[_load] = [subprocess.Popen([sys.executable, "-c", _LOAD]) for _ in cores]


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the load."""
    for process in config.stash.get(_load, []):
        process.kill()
        process.wait()


@pytest.fixture
def stress_round(request: pytest.FixtureRequest) -> int:
    """The round's number."""
    found: int = request.param
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Tear every fixture down, those of the session too: the next round makes them again."""
    yield
    if item.config.getoption("stress"):
        item.session._setupstate.teardown_exact(None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Add the rounds to a test that is stressed."""
    if metafunc.config.getoption("stress"):
        rounds = range(1, metafunc.config.getoption("stress_rounds") + 1)
        metafunc.fixturenames.append("stress_round")
        ids = [f"round{number}" for number in rounds]
        metafunc.parametrize("stress_round", rounds, indirect=True, ids=ids)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the named parameters of a test alone, where one is named as PATH::TEST[PARAMETER]."""
    named = {each for each in config.getoption("stress") or () if each.endswith("]")}
    tests = {each.partition("[")[0] for each in named}

    def is_wanted(item: pytest.Item) -> bool:
        nodeid = re.sub(r"-round\d+|round\d+-", "", item.nodeid)
        return nodeid in named or nodeid.partition("[")[0] not in tests

    items[:] = [item for item in items if is_wanted(item)]
