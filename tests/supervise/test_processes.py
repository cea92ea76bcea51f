"""Finding a run's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from payload.core.errors import ExitCode
from payload.machines.rank_variables import RUN_DIR
from payload.supervise import processes
from payload.supervise.processes import (
    kill_until_none,
    parse_ps,
    processes_of,
    signal_process,
    wait_until_none,
)
from tests.supervise.planned import REPO, plan_stand_in, state_of, wait_for
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.processes

SLEEP = "import time; time.sleep(600)"
# A child without the variable in its environment; its exit does not end its parent.
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], env={{}})
{SLEEP}
"""


def test_children_without_the_mark_belong_to_the_run_too(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env={**os.environ, RUN_DIR: str(tmp_path)}
    )
    wait_for(lambda: len(processes_of(tmp_path)) == 2, "the child")
    assert processes_of(tmp_path / "other") == set()
    assert kill_until_none(tmp_path, timeout_s=DEADLINE_S) == set()
    assert parent.wait() == -signal.SIGKILL
    assert wait_until_none(tmp_path, timeout_s=0.0) == set()


def test_a_process_in_the_middle_of_an_exec_belongs_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Popen returns before the new program's variables are readable, which can take long."""
    entry = tmp_path / "proc" / "77"
    entry.mkdir(parents=True)
    fields = ["S", "1", *["7"] * 50]
    fields[51 - 3] = "0"  # env_end of proc_pid_stat(5)
    (entry / "stat").write_text(f"77 (mpirun) {' '.join(fields)}")
    (entry / "environ").touch()

    def end_exec(_seconds: float) -> None:
        (entry / "environ").write_bytes(f"{RUN_DIR}={tmp_path}\0".encode())

    monkeypatch.setattr(processes, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(
        processes, "time", SimpleNamespace(monotonic=time.monotonic, sleep=end_exec)
    )
    assert processes_of(tmp_path) == {77}
    # A kernel thread has neither variables nor memory.
    fields[23 - 3] = "0"
    (entry / "stat").write_text(f"77 (kworker) {' '.join(fields)}")
    (entry / "environ").write_bytes(b"")
    assert processes_of(tmp_path) == set()


def test_a_process_that_is_not_the_runs_is_never_signalled(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", SLEEP])
    assert not signal_process(stranger.pid, signal.SIGTERM, run_dir=tmp_path)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_ps_lines_name_the_runs_living_processes() -> None:
    text = """\
    1 Ss   /sbin/launchd
  812 S+   python -m payload.train --run-dir /runs/a b
  813 Z    python -m payload.train --run-dir /runs/a b
  814 R    python -m payload.train --run-dir /runs/a bc
"""
    assert parse_ps(text, run_dir=Path("/runs/a b")) == {812}


_WITHOUT_SUBREAPER = """
import os, sys
from payload.supervise import processes
from payload.supervise.__main__ import main
processes._PR_SET_CHILD_SUBREAPER = 10**6  # as in an emulator that lacks it
sys.exit(main(sys.argv[1:], os.environ))
"""


@pytest.mark.ranks
def test_a_run_does_not_need_to_adopt_orphans(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run")
    command = [sys.executable, "-c", _WITHOUT_SUBREAPER, "--run-dir", str(paths.root)]
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert done.returncode == ExitCode.OK, done.stderr
    assert "found only by their variables ([Errno 22] Invalid argument)" in done.stderr
    assert state_of(paths).status == "finished"
