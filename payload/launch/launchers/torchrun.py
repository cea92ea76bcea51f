"""torch's own launcher, torchrun: on one node."""

from __future__ import annotations

from payload.launch.launchers.base import Job, Launcher
from payload.rank_variables import TORCHRUN


class Torchrun(Launcher):
    """`python -m torch.distributed.run`, on every system that torch runs on."""

    variables = TORCHRUN
    preference = 1
    spans_nodes = False

    def argv(self, job: Job) -> tuple[str, ...]:
        """Return torchrun's command line; the ranks inherit its environment."""
        return (
            *(job.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1", "--nproc-per-node", str(job.world_size)),
            *("--master-addr", job.rendezvous.address),
            *("--master-port", str(job.rendezvous.port)),
            # By default its own files go to a new folder in the temporary one, and stay there.
            *("--max-restarts", "0", "--log-dir", str(job.folder / "logs" / "torchrun")),
            *job.words,
        )


LAUNCHER = Torchrun()
