"""`python -m payload.supervise.agents JOB`: runs a launcher's agent on every node.

Over SSH, the head starts this program with `--node` on each node, and writes the node's command to
stdin as one JSON object. Stdin stays open as a lifeline: when it closes because the head or the
connection is gone, the program kills the run's processes on that node. On the head, the exit status
is the first nonzero status of an agent.

In a Slurm job, srun starts this program on every node with `--task JOB`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from payload.core.errors import ConfigError, ExitCode, TileforgeError
from payload.core.python_processes import code_environment, module_command
from payload.core.suggested_commands import command
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.launch.agent_launcher import AgentJob, end_of_agent
from payload.machines.rank_variables import NODE_RANK, RUN_DIR, SLURM_NODE
from payload.run_record.run_files import RankProgress, RunPaths, last_record
from payload.supervise.heartbeat_receiver import remote_argv
from payload.supervise.processes import die_with_parent, kill_until_none, signal_process

_POLL_S = 0.1
_KILL_S = 10.0
# Timeout after one agent has failed, for agents that wait for an agent that never started. In other
# cases, the supervisor knows the state of the ranks and ends the remaining agents sooner.
_GRACE_S = 150.0
_NOT_STARTED = (126, 127, 255)
"""Exit statuses of ssh if it cannot connect, and of a shell that cannot run the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeJob:
    """The message to one node."""

    job: str
    """The AgentJob, as JSON."""
    node_rank: int
    address: str


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Start the agents of all nodes, or run as the agent of one node."""
    parser = argparse.ArgumentParser(prog=command("supervise.agents"))
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("job", nargs="?", metavar="JOB", help="an AgentJob as JSON")
    which.add_argument("--node", action="store_true", help="run as a node's agent; job on stdin")
    which.add_argument("--task", metavar="JOB", help="run as the agent of a node in a Slurm step")
    arguments = parser.parse_args(argv)
    try:
        if arguments.task is not None:
            return _run_as_task(AgentJob.from_json(arguments.task), env)
        return (
            _run_on_node(env) if arguments.node else _run_on_head(AgentJob.from_json(arguments.job))
        )
    except TileforgeError as error:
        _log(f"error: {error}")
        return error.exit_code


def _run_on_head(job: AgentJob) -> int:
    """Start one agent per node, and wait until all agents have ended."""
    agents = [_Agent(job, node_rank, address) for node_rank, address in enumerate(_hosts(job))]
    first, ends_s = 0, math.inf
    while agents:
        time.sleep(_POLL_S)
        for agent in [each for each in agents if each.process.poll() is not None]:
            agents.remove(agent)
            status = agent.process.returncode
            if status:
                _log(end_of_agent(agent.address, status))
                first = first or status
                grace_s = 0.0 if status in _NOT_STARTED else _GRACE_S
                ends_s = min(ends_s, time.monotonic() + grace_s)
        if time.monotonic() >= ends_s:
            ends_s = math.inf
            for agent in agents:
                agent.end()
    return 128 - first if first < 0 else first


def _hosts(job: AgentJob) -> list[str]:
    return Path(job.hosts).read_text(encoding="ascii").split()


class _Agent:
    """The head's handle of a node's agent: a local process, or an ssh client."""

    def __init__(self, job: AgentJob, node_rank: int, address: str) -> None:
        self.address = address
        self._is_local = node_rank == 0
        argv = module_command("payload.supervise.agents", "--node")
        if not self._is_local:
            names = ("PYTHONPATH", RUN_DIR)
            settings = {name: job.environment[name] for name in names if name in job.environment}
            argv = remote_argv(address, ssh=job.ssh, argv=argv, environment=settings)
        self.process = subprocess.Popen(
            argv,
            env=code_environment(os.environ),
            stdin=subprocess.PIPE,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
        message = {"job": job.to_json(), "node_rank": node_rank, "address": address}
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its exit status has the reason
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """Close the lifeline. On the head, the supervisor ends the remaining processes."""
        assert self.process.stdin is not None
        if self._is_local:
            self.process.kill()
        self.process.stdin.close()


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _run_on_node(env: Mapping[str, str]) -> int:
    """Run the agent until it ends or the lifeline is closed."""
    line = sys.stdin.buffer.readline()
    message = build(_NodeJob, parse_json(line, where="agents"), where="agents")
    return _run(
        AgentJob.from_json(message.job),
        message.node_rank,
        message.address,
        env=env,
        # The head writes only one line. After that line, readable input means end of file.
        lifeline_ended=lambda: (
            bool(select.select([0], [], [], _POLL_S)[0]) and not os.read(0, 4096)
        ),
    )


def _run_as_task(job: AgentJob, env: Mapping[str, str]) -> int:
    """Run the agent until it ends; on the head, forward a SIGTERM from Slurm to rank 0.

    With proctrack/cgroup, Slurm signals only this process; with other plugins, it also signals all
    descendants. Rank 0 may thus get the signal twice. Two signals have the same effect as one.
    """
    requests: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: requests.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hosts, index = _hosts(job), env.get(SLURM_NODE, "")
    if not index.isdecimal() or int(index) >= len(hosts):
        raise ConfigError(
            f"{SLURM_NODE} = {index!r}, but the run has nodes 0 to {len(hosts) - 1}. Start the run "
            "again, and let srun start this program."
        )
    node_rank = int(index)

    def lifeline_ended() -> bool:
        time.sleep(_POLL_S)
        count = len(requests)
        if count and node_rank == 0 and _stop_rank_0(Path(job.environment[RUN_DIR])):
            del requests[:count]
        # If the supervisor is gone, the wrappers of the ranks on the head end these ranks. torchrun
        # on the other nodes then loses the store, and kills its ranks 30 s later.
        return False

    return _run(
        job,
        node_rank,
        hosts[node_rank],
        env=env,
        lifeline_ended=lifeline_ended,
        ignored=(signal.SIGTERM,),
    )


def _stop_rank_0(run_dir: Path) -> bool:
    """Send SIGTERM to rank 0.

    Rank 0 then stops all ranks. Return False if rank 0 does not run yet.
    """
    progress = last_record(RankProgress, RunPaths(run_dir).rank_progress(0))
    return progress is not None and signal_process(progress.pid, signal.SIGTERM, run_dir=run_dir)


def _run(
    job: AgentJob,
    node_rank: int,
    address: str,
    *,
    env: Mapping[str, str],
    lifeline_ended: Callable[[], bool],
    ignored: Sequence[signal.Signals] = (),
) -> int:
    """Run the agent of one node; the agent process ignores the signals in `ignored`.

    `lifeline_ended` waits a moment and returns True if the run must end on this node.
    """
    die = die_with_parent(signal.SIGKILL)

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        if die is not None:
            die()

    with tempfile.TemporaryDirectory(prefix="tileforge-", ignore_cleanup_errors=True) as scratch:
        argv = job.on_node(node_rank, address, scratch=scratch)
        try:
            agent = subprocess.Popen(
                argv,
                env={**env, **job.environment, NODE_RANK: str(node_rank)},
                stdin=subprocess.DEVNULL,
                preexec_fn=prepare,
            )
        except OSError as error:
            _log(f"error: {argv[0]}: {error.strerror}")
            return 127
        while agent.poll() is None:
            if lifeline_ended():
                kill_until_none(Path(job.environment[RUN_DIR]), timeout_s=_KILL_S)
                agent.kill()
                agent.wait()
                return ExitCode.RANK_LOST
    return 128 - agent.returncode if agent.returncode < 0 else agent.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
