"""Describes the agents of launchers that need one agent process on every node.

`payload.supervise.agents` starts one agent per node over SSH, or runs as the agent of a node in a
step of a Slurm job. That program does not depend on the launcher.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.launch.launcher import Job, LostNode, Report

NODE_RANK, IS_HEAD, ADDRESS, SCRATCH = "{node_rank}", "{is_head}", "{address}", "{scratch}"
"""Placeholders in the arguments of an agent: the index of the node in the hosts file; 1 on the
first node and 0 on others; the address of the node; and an empty folder on the node. The folder is
removed when the agent ends."""

_LOST = re.compile(r"^agent on (?P<address>\S+) (?P<how>exited with status 255)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJob:
    """The agents of one attempt."""

    hosts: str
    """Path of the hosts file on the head: one address per line, the head first."""
    ssh: tuple[str, ...]
    """Arguments of ssh to reach the other nodes; empty if a scheduler starts the agents."""
    command: tuple[str, ...]
    """Program and arguments of an agent, with placeholders."""
    words: tuple[str, ...]
    """Further arguments, which are passed to the agents unchanged."""
    environment: Mapping[str, str]
    """Environment variables of every agent, in addition to the environment on the node."""

    def to_json(self) -> str:
        """Return the job as one argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AgentJob:
        """Parse the text that `to_json` returned. Raises ConfigError."""
        return build(cls, parse_json(text, where="agents"), where="agents")

    def on_node(self, node_rank: int, address: str, *, scratch: str) -> tuple[str, ...]:
        """Return the command line of the agent on one node."""
        values = {
            NODE_RANK: str(node_rank),
            IS_HEAD: str(int(node_rank == 0)),
            ADDRESS: address,
            SCRATCH: scratch,
        }
        filled = []
        for text in self.command:
            for placeholder, value in values.items():
                text = text.replace(placeholder, value)
            filled.append(text)
        return (*filled, *self.words)


def agents_argv(
    job: Job, command: tuple[str, ...], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the command line that starts an agent on every node, over SSH or as a job step."""
    agents = AgentJob(
        hosts=str(job.hosts),
        ssh=job.reach.ssh,
        command=command,
        words=job.rank_arguments,
        environment={**job.environment, **environment},
    )
    program, each_node = (job.python, "-m", "payload.supervise.agents"), job.reach.each_node_command
    if each_node:
        return (*each_node, *program, "--task", agents.to_json())
    return (*program, agents.to_json())


def end_of_agent(address: str, status: int) -> str:
    """Return the log line for the end of an agent."""
    return f"agent on {address} exited with status {status}"


def report_of_agents(text: str) -> Report:
    """Parse the log lines about agents, and report the first node to which ssh was lost."""
    lost = _LOST.search(text)
    return Report(lost=LostNode(address=lost["address"], how=lost["how"]) if lost else None)
