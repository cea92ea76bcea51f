"""A fork of a Python process with torch behaves like a new Python process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import PYTHON, REPO, rank_env
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.processes

_SAYS = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["GIVEN"], input(), "torch" in sys.modules)
sys.exit("the end")
"""
_WAITS = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
# As on a busy machine: the client only runs again after the program's end.
_CLIENT_IS_SLOW = """
import select, socket
from tests.support import forked

send_fds = socket.send_fds

def send(server, *arguments):
    sent = send_fds(server, *arguments)
    poll = select.poll()
    poll.register(server, 0)  # always reports a hang-up
    poll.poll()
    return sent

socket.send_fds = send
forked.main()
"""


@pytest.mark.parametrize(("threads", "has_torch"), [("1", True), ("2", False)])
def test_it_has_the_arguments_variables_folder_and_streams_it_was_given(
    tmp_path: Path, threads: str, has_torch: bool
) -> None:
    program = tmp_path / "says.py"
    program.write_text(_SAYS, encoding="utf-8")
    done = subprocess.run(
        [*PYTHON, str(program), "-x", "é"],
        cwd=tmp_path,
        env=rank_env(GIVEN="a b", OMP_NUM_THREADS=threads),
        input="line\n",
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.stdout == f"['-x', 'é'] {tmp_path} a b line {has_torch}\n"
    assert (done.stderr, done.returncode) == ("the end\n", 1)


def test_a_program_may_end_before_its_client_runs_again(tmp_path: Path) -> None:
    program = tmp_path / "short.py"
    program.write_text("print('short')\nraise SystemExit(3)\n")
    done = subprocess.run(
        [sys.executable, "-c", _CLIENT_IS_SLOW, str(program)],
        cwd=REPO,
        env=rank_env(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("short\n", "", 3)


def test_an_error_is_a_traceback_and_exit_code_1(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text("import atexit\natexit.register(print, 'at exit')\n1 / 0\n")
    done = subprocess.run(
        [*PYTHON, str(program)], env=rank_env(), capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert (done.stdout, done.returncode) == ("at exit\n", 1)


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGUSR1, 7), (signal.SIGTERM, -15), (signal.SIGINT, -2)]
)
def test_a_signal_reaches_it_and_it_ends_as_it_would(
    tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    process, _ = _waiting(tmp_path)
    with process:
        process.send_signal(sent)
        assert process.wait(timeout=DEADLINE_S) == status


def test_it_ends_with_the_process_that_stands_for_it(tmp_path: Path) -> None:
    process, fork = _waiting(tmp_path)
    ended = os.pidfd_open(fork)
    with process:
        process.kill()
        assert select.select([ended], [], [], 60)[0], "it is still there"
    os.close(ended)


def test_what_kills_it_ends_the_process_that_stands_for_it(tmp_path: Path) -> None:
    process, fork = _waiting(tmp_path)
    with process:
        os.kill(fork, signal.SIGKILL)
        assert process.wait(timeout=DEADLINE_S) == -signal.SIGKILL


def _waiting(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a program that waits for signals; return it and the process id of the fork."""
    program = folder / "waits.py"
    program.write_text(_WAITS, encoding="utf-8")
    process = subprocess.Popen(
        [*PYTHON, str(program)], env=rank_env(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())
