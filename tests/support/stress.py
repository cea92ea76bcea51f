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
"""Computes until its parent has ended."""

_load = pytest.StashKey[list[subprocess.Popen[bytes]]]()


def add_options(parser: pytest.Parser) -> None:
    """Add the options. A hook of this plugin would run after parsing."""
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
    """Collect only these tests, and start the load."""
    selected = config.getoption("stress")
    if not selected:
        return
    config.args = [each.partition("[")[0] for each in selected]
    config.option.markexpr = ""
    # pytest-xdist's workers have the same options, but one load is enough.
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
    """Return the round's number."""
    found: int = request.param
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Tear down every fixture, including session fixtures, for the next round."""
    yield
    if item.config.getoption("stress"):
        item.session._setupstate.teardown_exact(None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a stressed test with the rounds."""
    if metafunc.config.getoption("stress"):
        rounds = range(1, metafunc.config.getoption("stress_rounds") + 1)
        metafunc.fixturenames.append("stress_round")
        ids = [f"round{number}" for number in rounds]
        metafunc.parametrize("stress_round", rounds, indirect=True, ids=ids)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the named parameters of tests given as PATH::TEST[PARAMETER]."""
    named = {each for each in config.getoption("stress") or () if each.endswith("]")}
    tests = {each.partition("[")[0] for each in named}

    def is_wanted(item: pytest.Item) -> bool:
        nodeid = re.sub(r"-round\d+|round\d+-", "", item.nodeid)
        return nodeid in named or nodeid.partition("[")[0] not in tests

    items[:] = [item for item in items if is_wanted(item)]
