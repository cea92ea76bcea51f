"""The launcher torchrun, which runs one agent per node; the agents rendezvous on the head."""

from __future__ import annotations

from dataclasses import replace

from payload.launch import agent_launcher as agents
from payload.launch.launcher import Job, Launcher, Report
from payload.launch.launchers import srun
from payload.machines.rank_variables import TORCHRUN

# Seconds until all agents must have connected. They start at the same time.
_JOIN_S = 120


class Torchrun(Launcher):
    """Starts ranks with `python -m torch.distributed.run`, on every system that torch supports."""

    variables = TORCHRUN
    preference = 1
    needs_ssh = False
    # In a Slurm job, srun starts the agents.
    keeps = srun.LAUNCHER.keeps
    noise = srun.LAUNCHER.noise

    def argv(self, job: Job) -> tuple[str, ...]:
        """Return the command line of torchrun; the ranks inherit the environment of torchrun.

        On several nodes, one agent starts on each node, over SSH or, in a Slurm job, through srun.
        The agent on the head serves torch's c10d store on the run's port. Agents and ranks
        rendezvous through this store.
        """
        program = (job.executable, "-m", "torch.distributed.run")
        if job.nodes == 1:
            return (
                *program,
                *("--nnodes", "1", "--nproc-per-node", str(job.world_size)),
                *("--master-addr", job.rendezvous.address),
                *("--master-port", str(job.rendezvous.port)),
                # By default, torch creates a new temporary folder and never removes it.
                *("--max-restarts", "0", "--log-dir", str(job.folder / "logs" / "torchrun")),
                *job.rank_arguments,
            )
        command: tuple[str, ...] = (
            *program,
            *("--nnodes", str(job.nodes), "--nproc-per-node", str(job.ranks_per_node)),
            *("--rdzv-backend", "c10d", "--rdzv-id", job.folder.name),
            *("--rdzv-endpoint", f"{job.rendezvous.address}:{job.rendezvous.port}"),
            # torch would identify the head by its hostname, which may not be resolvable.
            *("--rdzv-conf", f"is_host={agents.IS_HEAD},join_timeout={_JOIN_S}"),
            *("--local-addr", agents.ADDRESS),
            *("--max-restarts", "0", "--log-dir", agents.SCRATCH),
        )
        if job.reach.each_node_command:
            # Slurm may send SIGTERM to every process of a step. torch would handle it by killing
            # the ranks after 30 s. Our agent forwards the signal to rank 0 instead, so that the
            # ranks can save until Slurm's KillWait is over.
            command = (*command, "--signals-to-handle", "SIGQUIT")
        # Without this variable, torch opens a second store on an arbitrary port.
        return agents.agents_argv(job, command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    def rank_settings(self, *, nodes: int) -> dict[str, str]:
        """Return the variable that makes ranks on several nodes use the store on the head."""
        return {"TORCHELASTIC_USE_AGENT_STORE": "True"} if nodes > 1 else {}

    def report(self, text: str) -> Report:
        """Find the lost agent in the output; killed tasks of srun are agents, not ranks."""
        found = agents.report_of_agents(text)
        return found if found.lost else replace(srun.LAUNCHER.report(text), killed=None)


LAUNCHER = Torchrun()
