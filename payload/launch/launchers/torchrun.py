"""torch's own launcher, torchrun: one agent on each node; the agents meet on the head."""

from __future__ import annotations

from dataclasses import replace

from payload.launch import agent_launcher as agents
from payload.launch.launcher import Job, Launcher, Report
from payload.launch.launchers import srun
from payload.machines.rank_variables import TORCHRUN

# Seconds. All agents start at the same time; the supervisor detects one that never connects.
_JOIN_S = 120


class Torchrun(Launcher):
    """`python -m torch.distributed.run`, on every system that torch runs on."""

    variables = TORCHRUN
    preference = 1
    needs_ssh = False
    # In a Slurm job, srun starts the agents.
    keeps = srun.LAUNCHER.keeps
    noise = srun.LAUNCHER.noise

    def argv(self, job: Job) -> tuple[str, ...]:
        """Return torchrun's command line; the ranks inherit its environment.

        Over several nodes, one agent starts on each, over SSH or, in a Slurm job, through srun. The
        head's agent serves torch's c10d store on the run's port. Agents and ranks meet through it.
        """
        program = (job.executable, "-m", "torch.distributed.run")
        if job.nodes == 1:
            return (
                *program,
                *("--nnodes", "1", "--nproc-per-node", str(job.world_size)),
                *("--master-addr", job.rendezvous.address),
                *("--master-port", str(job.rendezvous.port)),
                # By default torch creates a new folder for its files in the temporary folder and
                # leaves it.
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
            # Slurm may send SIGTERM to every process of a step, and torch would kill the ranks 30 s
            # later. The agent forwards the signal to rank 0; the ranks can save until Slurm's
            # KillWait.
            command = (*command, "--signals-to-handle", "SIGQUIT")
        # Without this, torch opens another store on an arbitrary port.
        return agents.agents_argv(job, command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    def rank_settings(self, *, nodes: int) -> dict[str, str]:
        """Return the setting by which ranks of several nodes use the store of the head's agent."""
        return {"TORCHELASTIC_USE_AGENT_STORE": "True"} if nodes > 1 else {}

    def report(self, text: str) -> Report:
        """Return which node's agent was lost; srun's tasks are agents, not ranks."""
        found = agents.report_of_agents(text)
        return found if found.lost else replace(srun.LAUNCHER.report(text), killed=None)


LAUNCHER = Torchrun()
