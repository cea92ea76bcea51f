"""torch's own launcher, torchrun: one agent on each node, which meet on the head."""

from __future__ import annotations

from dataclasses import replace

from payload.launch import agent_launcher as agents
from payload.launch.launcher import Job, Launcher, Report
from payload.launch.launchers import srun
from payload.machines.rank_variables import TORCHRUN

# Seconds. The agents are started together, and what never comes is for the supervisor to see.
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

        Over several nodes an agent is started on each, over SSH or, in a Slurm job, by srun. They
        meet through torch's c10d store, which the head's agent serves on the run's port, and
        through which the ranks then meet, too.
        """
        program = (job.executable, "-m", "torch.distributed.run")
        if job.nodes == 1:
            return (
                *program,
                *("--nnodes", "1", "--nproc-per-node", str(job.world_size)),
                *("--master-addr", job.rendezvous.address),
                *("--master-port", str(job.rendezvous.port)),
                # By default its own files go to a new folder in the temporary one, and stay there.
                *("--max-restarts", "0", "--log-dir", str(job.folder / "logs" / "torchrun")),
                *job.words,
            )
        command: tuple[str, ...] = (
            *program,
            *("--nnodes", str(job.nodes), "--nproc-per-node", str(job.ranks_per_node)),
            *("--rdzv-backend", "c10d", "--rdzv-id", job.folder.name),
            *("--rdzv-endpoint", f"{job.rendezvous.address}:{job.rendezvous.port}"),
            # torch would look for the head by its hostname, which need not be resolved anywhere.
            *("--rdzv-conf", f"is_host={agents.IS_HEAD},join_timeout={_JOIN_S}"),
            *("--local-addr", agents.ADDRESS),
            *("--max-restarts", "0", "--log-dir", agents.SCRATCH),
        )
        if job.reach.each_node_command:
            # Slurm may send SIGTERM to every process of a step, and torch would kill the ranks 30 s
            # later. Rank 0 hears it from the agent, too; they save for as long as Slurm's KillWait.
            command = (*command, "--signals-to-handle", "SIGQUIT")
        # Without this, torch opens another store on a port that nobody has chosen.
        return agents.agents_argv(job, command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    def rank_settings(self, *, nodes: int) -> dict[str, str]:
        """Return where the ranks of several nodes meet: at the store of the head's agent."""
        return {"TORCHELASTIC_USE_AGENT_STORE": "True"} if nodes > 1 else {}

    def report(self, text: str) -> Report:
        """Return which node's agent was lost; srun's tasks are agents, and no ranks."""
        found = agents.report_of_agents(text)
        return found if found.lost else replace(srun.LAUNCHER.report(text), killed=None)


LAUNCHER = Torchrun()
