"""The launcher srun, which starts ranks on a job's nodes without SSH; ranks communicate by gloo."""

from __future__ import annotations

import re
import signal

from payload.launch.launcher import Job, KilledRank, Launcher, LostNode, Report
from payload.machines.rank_variables import SLURM

STEP = (
    *("--overlap", "--overcommit", "--mem=0", "--cpu-bind=none", "--mpi=none"),
    *("--export=ALL", "--kill-on-bad-exit=0", "--wait=0"),
)
"""Options of every job step. A step shares all resources of the job with the other steps. A rank
binds itself to its cores, and the supervisor decides what happens after a rank ends."""

NODE_COMMAND = ("srun", *STEP, "--nodes=1", "--ntasks=1", "--nodelist={node}", "--quiet")
"""Prefix that runs a command on another node of the job."""

_KILLED = re.compile(
    r"^srun: error: (?P<node>\S+): task (?P<rank>\d+): (?P<how>[A-Z][\w ]+)$", re.M
)
_LOST = re.compile(r"^srun: error: Node failure on (?P<node>\S+)", re.M)
_CANCELLED = re.compile(r"DUE TO (NODE FAILURE|PREEMPTION|TIME LIMIT|JOB REQUEUE)")
_REFUSED = re.compile(r"^srun: error: (Unable to create step for job \d+: .*|Unable to .*)$", re.M)


def each_node_command(srun: str, nodes: int) -> tuple[str, ...]:
    """Return the command prefix that runs a command as one task on each node of the job.

    Tasks are numbered in the order in which Slurm lists the nodes of the job.
    """
    return (
        *(srun, f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *("--distribution=block", "--input=none", *STEP),
    )


def ranks_command(
    srun: str, *, nodes: int, world_size: int, ranks_per_node: int
) -> tuple[str, ...]:
    """Return the command prefix that starts a program on every rank of the job.

    Like the rank file, srun fills one node after the other, in the order in which Slurm lists the
    nodes of the job.
    """
    return (
        *(srun, f"--nodes={nodes}", f"--ntasks={world_size}"),
        *(f"--ntasks-per-node={ranks_per_node}", "--distribution=block", "--input=none"),
        *STEP,
    )


class Srun(Launcher):
    """Starts ranks with srun within the allocation of a job."""

    variables = SLURM
    program = "srun"
    install = "srun is a program of Slurm; contact the administrators of the cluster"
    version = "slurm"
    needs_ssh = False
    scheduler = "slurm"
    # Limits of the job, such as memory or tasks, are removed: each step requests its resources.
    keeps = (
        *("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_JWT"),
        *("SLURM_WORKING_CLUSTER", "SLURM_TOPOLOGY"),
    )
    noise = re.compile(
        r"^srun: (?:cluster configuration lacks|got SIGCONT|forcing job termination|Job step abo)"
    )

    def argv(self, job: Job) -> tuple[str, ...]:
        """Return the command line of srun; the ranks inherit the environment of srun."""
        prefix = ranks_command(
            job.executable,
            nodes=job.nodes,
            world_size=job.world_size,
            ranks_per_node=job.ranks_per_node,
        )
        return (*prefix, job.python, *job.rank_arguments)

    def report(self, text: str) -> Report:
        """Find killed tasks, lost nodes and rejected steps in the output of srun."""
        lost, why, refused = _LOST.search(text), _CANCELLED.search(text), _REFUSED.search(text)
        killed = next(filter(None, map(_killed, _KILLED.finditer(text))), None)
        gone = LostNode(address=lost["node"], how="failed, according to Slurm") if lost else None
        if gone is None and why is not None:
            gone = LostNode(address="the job", how=f"was ended by Slurm ({why[1].lower()})")
        return Report(
            killed=killed,
            lost=gone,
            not_started=f"srun started no rank: {refused[1]}" if refused else None,
        )


def _killed(found: re.Match[str]) -> KilledRank | None:
    """Return the rank in a line of srun if the line names a signal, such as `Killed`."""
    for number in signal.valid_signals():
        if signal.strsignal(number) == found["how"].removesuffix(" (core dumped)"):
            return KilledRank(rank=int(found["rank"]), address=found["node"], signal=int(number))
    return None


LAUNCHER = Srun()
