"""Where and how a trial's program starts: the arguments of remote/trial.py. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from payload.inventory import ClusterInventory
from payload.launch.environment import FOREIGN_PREFIXES, Rendezvous, common_environment
from payload.launch.files import render_hosts
from payload.launch.plan import mpirun_program_argv
from payload.launch.ranks import Placement

# mpirun starts in a second, torch loads in three on two cores, the products and the exchange have
# budgets of some seconds each. The ranks end by themselves before.
DEADLINE_S = 24.0
_RANKS_END_S = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how the trial's program starts."""

    placement: Placement
    interfaces: Mapping[str, str]
    address: str
    """Where the ranks meet."""
    port: int
    folder: PurePath
    """On the head; it has the hosts file, and its name marks the processes."""
    python: str
    python_path: str | None
    mpirun: str | None
    """None: one process, without a launcher."""
    mpirun_environment: Mapping[str, str]

    def arguments(self, inventory: ClusterInventory, *, ssh_config: str | None) -> dict[str, Any]:
        """What remote/trial.py takes."""
        environment = common_environment(
            run_id=self.folder.name,
            run_dir=str(self.folder),
            rendezvous=Rendezvous(address=self.address, port=self.port, interfaces=self.interfaces),
            malloc="tuned",
            tcmalloc=None,
            oversubscribed=self.placement.oversubscribed,
            python_path=self.python_path,
        )
        program = (self.python, "-m", "payload.train.fabric", json.dumps(self._ranks()))
        argv: tuple[str, ...] = program
        if self.mpirun is not None:
            argv = mpirun_program_argv(
                program,
                mpirun=self.mpirun,
                hosts=self.folder / "hosts",
                world_size=self.placement.world_size,
                ranks_per_node=self.placement.ranks_per_node,
                environment=environment,
            )
        return {
            "ssh_config": ssh_config,
            "workers": {node.name: node.address for node in inventory.nodes[1:]},
            "hosts_file": str(self.folder / "hosts"),
            "hosts": render_hosts(inventory),
            "argv": argv,
            "environment": {**self.mpirun_environment, **environment},
            # mpirun calls mpiexec.hydra, which lies beside it, by its bare name.
            "path": str(PurePath(argv[0]).parent),
            "without": FOREIGN_PREFIXES,
            "deadline_s": DEADLINE_S,
        }

    def _ranks(self) -> dict[str, Any]:
        ranks = [
            {
                "node": rank.node,
                "cores": rank.cores,
                "threads": rank.threads,
                "interface": self.interfaces[rank.node],
            }
            for rank in self.placement.ranks
        ]
        return {"deadline_s": _RANKS_END_S, "ranks": ranks}
