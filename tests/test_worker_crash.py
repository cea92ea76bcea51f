"""A test session whose worker crashes ends and fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import REPO
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.processes

_CONFTEST = """
import os, pathlib, signal
from tests.support import stress

pytest_addoption = stress.add_options
pytest_plugins = ["tests.support.groups"]
crashed = pathlib.Path(__file__).with_name("crashed")

def crash():
    crashed.open("a").write("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
_CRASH_AT_THE_END = """
def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput") and not crashed.exists():
        crash()
"""
_PASSES = "def test_{}():\n    pass\n"
_CRASHES = "def test_crash():\n    from conftest import crash\n    crash()\n"


def run_suite(folder: Path, conftest: str, files: list[str]) -> subprocess.CompletedProcess[str]:
    """Run these test files on two workers."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="ascii")
    (folder / "conftest.py").write_text(conftest, encoding="utf-8")
    for number, text in enumerate(files):
        (folder / f"test_{number}.py").write_text(text, encoding="utf-8")
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--no-loadscope-reorder"]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    # A session that does not end fails here.
    return subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def passing(count: int) -> str:
    return "".join(_PASSES.format(number) for number in range(count))


@pytest.mark.parametrize(
    "place", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
def test_a_crash_fails_one_test_and_the_others_run(tmp_path: Path, place: int) -> None:
    files = [passing(count) for count in (3, 1, 1, 4, 1)]
    files.insert(place, passing(2) + _CRASHES + "def test_after():\n    pass\n")
    done = run_suite(tmp_path, _CONFTEST, files)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 failed, 13 passed"), done.stdout
    assert f"crashed while running 'test_{place}.py::test_crash'" in done.stdout
    assert (tmp_path / "crashed").read_text(encoding="ascii") == "x"


def test_a_crash_in_no_test_fails_the_session(tmp_path: Path) -> None:
    done = run_suite(tmp_path, _CONFTEST + _CRASH_AT_THE_END, [passing(2), passing(2)])
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("4 passed"), done.stdout
    assert "node down" in done.stdout
