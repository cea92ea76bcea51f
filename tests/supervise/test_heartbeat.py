"""A worker's heartbeats, from the real program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.machines.rank_variables import RUN_DIR
from payload.run_record.run_files import RankExit, RankProgress, RunPaths, write_json
from payload.supervise.heartbeat import EVERY_S
from tests.supervise.planned import REPO
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.processes


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


@pytest.fixture
def sleeper(paths: RunPaths) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run."""
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_DIR: str(paths.root)})
    yield process
    process.kill()
    process.wait()


def start(paths: RunPaths, *, lifeline_s: float = 600.0) -> subprocess.Popen[bytes]:
    words = ["--run-dir", str(paths.root), "--lifeline", str(lifeline_s)]
    return subprocess.Popen(
        [sys.executable, "-m", "payload.supervise.heartbeat", *words],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def test_it_reports_ranks_ends_them_on_request_and_exits_with_its_reader(
    paths: RunPaths, sleeper: subprocess.Popen[bytes]
) -> None:
    progress = RankProgress(
        rank=3, node="n", pid=sleeper.pid, step=7, phase="eval", time_unix=time.time()
    )
    write_json(paths.rank_progress(3), progress)
    write_json(
        paths.rank_exit(4), RankExit(rank=4, node="n", exit_code=40, error="x", time_unix=1.0)
    )
    paths.rank_progress(5).write_text("half of a rec", encoding="utf-8")
    with start(paths) as process:
        assert process.stdin is not None and process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert [(each["rank"], each["phase"]) for each in first["progress"]] == [(3, "eval")]
        assert [each["error"] for each in first["exits"]] == ["x"]
        assert first["states"] == {"3": "S"}
        assert abs(first["now"] - time.time()) < DEADLINE_S
        process.stdin.write(b"ping\nend:4\n")
        process.stdin.flush()
        told: dict[str, object] = {}
        while "ended" not in told:
            told = json.loads(process.stdout.readline())
        assert (told["ended"], told["asked"]) == ([], 4)
        assert sleeper.wait(DEADLINE_S) == -9
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0


def test_it_sends_sigterm_to_the_named_process_of_the_run_and_to_no_other(
    paths: RunPaths, sleeper: subprocess.Popen[bytes]
) -> None:
    with subprocess.Popen(["sleep", "600"]) as other, start(paths) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"ping\nstop:{other.pid}\n".encode())
        process.stdin.flush()
        process.stdout.readline()
        process.stdin.write(f"ping\nstop:{sleeper.pid}\n".encode())
        process.stdin.flush()
        assert sleeper.wait(DEADLINE_S) == -signal.SIGTERM
        assert other.poll() is None
        other.kill()
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0


def test_without_messages_from_the_head_the_node_ends_the_run_itself(
    paths: RunPaths, sleeper: subprocess.Popen[bytes]
) -> None:
    with start(paths, lifeline_s=0.5) as process:
        assert process.wait(DEADLINE_S) == 0
        assert sleeper.wait(DEADLINE_S) == -9


def test_a_message_from_the_head_causes_no_extra_heartbeat(paths: RunPaths) -> None:
    """Or the two would answer each other without end, on a core of each node."""
    began_s = time.monotonic()
    with start(paths) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        for _ in range(50):
            process.stdin.write(b"ping\n")
            process.stdin.flush()
            time.sleep(0.01)
        process.stdin.write(b"end:1\n")
        process.stdin.flush()
        beats = 1
        while "ended" not in json.loads(process.stdout.readline()):
            beats += 1
        # One is due every second, however long a busy machine takes.
        assert beats <= 1 + (time.monotonic() - began_s) / EVERY_S
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0
