"""A launcher's agents: real processes, here on the head's own node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.launch.agent_launcher import (
    ADDRESS,
    IS_HEAD,
    NODE_RANK,
    SCRATCH,
    AgentJob,
    end_of_agent,
)
from payload.machines.rank_variables import RUN_DIR
from payload.run_record.run_files import RankProgress, RunPaths, write_json
from payload.supervise.processes import kill_until_none, processes_of
from tests.support.launching import REPO
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "a run"
    folder.mkdir()
    yield folder
    kill_until_none(folder, timeout_s=DEADLINE_S)


def start(run_dir: Path, program: str, *words: str) -> subprocess.Popen[str]:
    """Start an agent that runs `program` with `words`, of which the last is verbatim."""
    return begin(run_dir, job_of(run_dir, program, *words).to_json())


def job_of(run_dir: Path, program: str, *words: str) -> AgentJob:
    hosts = run_dir / "hosts"
    hosts.write_text("127.0.0.1\n", encoding="ascii")
    return AgentJob(
        hosts=str(hosts),
        ssh=(),
        command=(sys.executable, "-c", program, *words),
        words=("{address}",),
        environment={RUN_DIR: str(run_dir), "PYTHONPATH": str(REPO), "GIVEN": "it's {scratch}"},
    )


def begin(run_dir: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "payload.supervise.agents", *words],
        cwd=REPO,
        env={**os.environ, RUN_DIR: str(run_dir), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_agent_gets_its_place_and_a_folder_that_goes(run_dir: Path) -> None:
    program = (
        "import json, os, sys\n"
        "names = ('TILEFORGE_NODE_RANK', 'GIVEN')\n"
        "was_there = os.path.isdir(sys.argv[4])\n"
        "print(json.dumps([sys.argv[1:], [os.environ[name] for name in names], was_there]))\n"
    )
    agents = start(run_dir, program, NODE_RANK, f"is_host={IS_HEAD}", ADDRESS, SCRATCH)
    out, err = agents.communicate(timeout=DEADLINE_S)
    assert agents.returncode == 0, err
    (rank, head, address, scratch, verbatim), given, was_there = json.loads(out)
    assert (rank, head, address, verbatim) == ("0", "is_host=1", "127.0.0.1", "{address}")
    assert given == ["0", "it's {scratch}"]
    assert was_there and not Path(scratch).exists()


@pytest.mark.parametrize(
    ("program", "status"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_status_is_that_of_the_agent(program: str, status: int, run_dir: Path) -> None:
    agents = start(run_dir, program)
    _, err = agents.communicate(timeout=DEADLINE_S)
    assert agents.returncode == status
    assert end_of_agent("127.0.0.1", status) in err


def test_nothing_outlives_the_lifeline(run_dir: Path) -> None:
    begun = run_dir / "begun"
    node = begin(run_dir, "--node")
    job = job_of(run_dir, sleeper(begun)).to_json()
    assert node.stdin is not None
    node.stdin.write(json.dumps({"job": job, "node_rank": 1, "address": "10.0.0.3"}) + "\n")
    node.stdin.flush()
    wait_until(begun.exists, what="the agent's child")
    node.stdin.close()
    assert node.wait(timeout=DEADLINE_S) == ExitCode.RANK_LOST
    assert not processes_of(run_dir)


def test_a_task_of_a_slurm_step_is_its_node_s_agent(run_dir: Path) -> None:
    program = "import os, sys; print(sys.argv[1:], os.environ['TILEFORGE_NODE_RANK'])"
    job = job_of(run_dir, program, NODE_RANK, f"is_host={IS_HEAD}", ADDRESS)
    (run_dir / "hosts").write_text("10.0.0.2\n10.0.0.3\n", encoding="ascii")
    task = begin(run_dir, "--task", job.to_json(), SLURM_NODEID="1")
    out, err = task.communicate(timeout=DEADLINE_S)
    assert (task.returncode, out) == (
        0,
        "['1', 'is_host=0', '10.0.0.3', '{address}'] 1\n",
    ), err


@pytest.mark.parametrize("number", ["", "2", "-1", "x"])
def test_a_task_outside_of_the_run_s_nodes_is_refused(run_dir: Path, number: str) -> None:
    job = job_of(run_dir, "raise SystemExit(7)").to_json()
    task = begin(run_dir, "--task", job, SLURM_NODEID=number)
    _, err = task.communicate(timeout=DEADLINE_S)
    assert task.returncode == ExitCode.CONFIG
    assert f"error: SLURM_NODEID = {number!r}, but the run has nodes 0 to 0. Start" in err


def test_slurm_s_sigterm_does_not_end_a_task_before_its_ranks(run_dir: Path) -> None:
    begun, ended = run_dir / "begun", run_dir / "ended"
    program = (
        "import pathlib, time\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        f"while not pathlib.Path({str(ended)!r}).exists(): time.sleep(0.05)\n"
        "raise SystemExit(7)\n"
    )
    task = begin(run_dir, "--task", job_of(run_dir, program).to_json(), SLURM_NODEID="0")
    wait_until(begun.exists, what="the agent")
    for pid in processes_of(run_dir):
        os.kill(pid, signal.SIGTERM)
    ended.touch()
    assert task.wait(timeout=DEADLINE_S) == 7


RANK_0 = """
import os, pathlib, signal, sys, time
heard, begun, ended = map(pathlib.Path, sys.argv[1:4])
signal.signal(signal.SIGTERM, lambda *_: heard.touch())
begun.write_text(str(os.getpid()))
while not ended.exists(): time.sleep(0.05)
"""


class SlurmNode:
    """A task of a step on one of two nodes, with rank 0 as the child of its agent."""

    def __init__(self, run_dir: Path, node_rank: int) -> None:
        self.heard, self.begun, self.ended = (run_dir / name for name in ("heard", "begun", "end"))
        self.paths = RunPaths(run_dir)
        rank = [sys.executable, "-c", RANK_0, *map(str, (self.heard, self.begun, self.ended))]
        program = f"import subprocess; raise SystemExit(7 + subprocess.call({rank!r}))"
        job = job_of(run_dir, program)
        (run_dir / "hosts").write_text("10.0.0.2\n10.0.0.3\n", encoding="ascii")
        self.task = begin(run_dir, "--task", job.to_json(), SLURM_NODEID=str(node_rank))
        wait_until(lambda: self.begun.exists() and self.begun.read_text() != "", what="rank 0")

    def record_rank_0(self) -> None:
        """Write the rank's record, as the trainer does."""
        record = self.paths.rank_progress(0)
        record.parent.mkdir(parents=True, exist_ok=True)
        progress = RankProgress(
            rank=0,
            node="node-1",
            pid=int(self.begun.read_text()),
            step=3,
            phase="step",
            time_unix=time.time(),
        )
        write_json(record, progress)

    def end(self) -> int:
        """Let rank 0 end; return the task's status."""
        self.ended.touch()
        return self.task.wait(timeout=DEADLINE_S)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_sigterm_to_the_first_node_s_task_alone_reaches_rank_0(
    run_dir: Path, has_begun: bool
) -> None:
    """As proctrack/cgroup sends it; also before rank 0 has written its record."""
    node = SlurmNode(run_dir, 0)
    if has_begun:
        node.record_rank_0()
    node.task.terminate()
    if not has_begun:
        node.record_rank_0()
    wait_until(node.heard.exists, what="SIGTERM in rank 0")
    node.heard.unlink()
    node.task.terminate()
    wait_until(node.heard.exists, what="another one")
    assert node.end() == 7


def test_the_other_nodes_tasks_keep_a_sigterm_to_themselves(run_dir: Path) -> None:
    node = SlurmNode(run_dir, 1)
    node.record_rank_0()
    node.task.terminate()
    time.sleep(1)
    assert node.task.poll() is None and not node.heard.exists()
    assert node.end() == 7


def sleeper(begun: Path) -> str:
    """A program whose own child would outlive it."""
    child: Sequence[str] = [sys.executable, "-c", "import time; time.sleep(600)"]
    return (
        "import pathlib, subprocess, time\n"
        f"subprocess.Popen({list(child)!r}, start_new_session=True)\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "time.sleep(600)\n"
    )
