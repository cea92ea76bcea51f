"""`.ci/run` cleans up after itself, and leaves other files alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.waiting import DEADLINE_S
from tests.test_architecture import ROOT

pytestmark = pytest.mark.processes

# A fake make that records its arguments.
_MAKE = """\
#!/bin/sh
echo "$*" >>asked
[ "$1" = "$FAILS" ] && exit 3
if [ "$1" = setup-ipex ]; then mkdir -p .venv-ipex; fi
"""


def ci(clone: Path, *, fails: str = "") -> int:
    """Return the exit status of `.ci/run` in a clone."""
    bin_dir = clone / "bin"
    bin_dir.mkdir()
    (bin_dir / "make").write_text(_MAKE, encoding="ascii")
    (bin_dir / "make").chmod(0o755)
    (clone / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", clone / ".ci")
    env = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "FAILS": fails}
    done = subprocess.run(
        ["bash", str(clone / ".ci" / "run")], env=env, check=False, timeout=DEADLINE_S
    )
    return done.returncode


def test_the_engine_s_environment_goes_when_this_run_has_made_it(tmp_path: Path) -> None:
    assert ci(tmp_path) == 0
    first, *middle, last = (tmp_path / "asked").read_text(encoding="ascii").splitlines()
    assert (first, last) == ("test-packages", "test-all")
    assert sorted(middle) == ["check", "setup-ipex"]
    assert not (tmp_path / ".venv-ipex").exists()


@pytest.mark.parametrize(
    ("fails", "status"),
    [("", 0), ("test-packages", 3), ("check", 3), ("setup-ipex", 3), ("test-all", 3)],
)
def test_one_that_was_there_before_stays(tmp_path: Path, fails: str, status: int) -> None:
    (tmp_path / ".venv-ipex").mkdir()
    assert ci(tmp_path, fails=fails) == status
    assert (tmp_path / ".venv-ipex").is_dir()
