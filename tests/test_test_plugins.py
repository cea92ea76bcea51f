"""The plugins of tests/conftest.py: stressed tests, marked processes, times of groups."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import REPO

pytestmark = pytest.mark.processes

_CONFTEST = """
from tests.support import started_processes, stress, timed_groups

def pytest_addoption(parser):
    stress.add_options(parser)

def pytest_configure(config):
    for name in (*started_processes.MARKERS, "slow"):
        config.addinivalue_line("markers", name)
    for plugin in (started_processes, stress, timed_groups):
        config.pluginmanager.register(plugin)
"""

_TESTS = """
import os, subprocess, sys
import psutil, pytest

def start():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.fixture(scope="module")
def starting():
    start()

@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return tmp_path_factory.mktemp("made")

@pytest.mark.processes
def test_marked():
    start()

def test_unmarked():
    start()

def test_first_with_a_fixture(starting):
    pass

def test_second_with_a_fixture(starting):
    pass

@pytest.mark.slow
@pytest.mark.processes
def test_quiet(made, starting):
    (made / "new").mkdir()
    (open(os.environ["LOADS"], "a")).write(f"{len(psutil.Process().children())}\\n")
"""


def run_pytest(folder: Path, *words: str) -> tuple[int, str]:
    """Run pytest on `_TESTS`; return its exit status and what it printed."""
    (folder / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
    (folder / "test_it.py").write_text(_TESTS, encoding="utf-8")
    (folder / "pytest.ini").touch()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=folder,
        env={"PATH": "", "PYTHONPATH": str(REPO), "LOADS": str(folder / "loads")},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_process_without_a_marker_fails_the_test_and_those_that_share_its_fixture(
    tmp_path: Path,
) -> None:
    code, printed = run_pytest(tmp_path, "-rE")
    assert code == 1
    failed = re.findall(r"^ERROR test_it.py::(\w+)", printed, re.MULTILINE)
    assert failed == ["test_unmarked", "test_first_with_a_fixture", "test_second_with_a_fixture"]
    assert "Mark it with pytest.mark.processes." in printed
    groups = dict(re.findall(r"^(in one process|processes|slow) +(\d+) ", printed, re.MULTILINE))
    assert groups == {"in one process": "3", "processes": "1", "slow": "1"}


def test_a_stressed_test_runs_several_times_with_fresh_fixtures_under_load(tmp_path: Path) -> None:
    words = ("--stress", "test_it.py::test_quiet", "--stress-rounds", "3", "-m", "not slow")
    code, printed = run_pytest(tmp_path, *words)
    assert code == 0, printed
    assert "3 passed" in printed and "deselected" not in printed
    # pytest's own children are the load: one per core.
    loads = (tmp_path / "loads").read_text(encoding="ascii").split()
    assert len(loads) == 3 and set(loads) == {loads[0]} and int(loads[0]) >= 1
