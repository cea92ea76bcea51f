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
from payload.launch.launchers.base import Job, Launcher, Reach
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
    launcher: Launcher
    executable: str
    """The launcher's path on the head."""
    reach: Reach

    def arguments(self, inventory: ClusterInventory) -> dict[str, Any]:
        """Return what remote/trial.py takes."""
        rendezvous = Rendezvous(address=self.address, port=self.port, interfaces=self.interfaces)
        environment = common_environment(
            run_id=self.folder.name,
            run_dir=str(self.folder),
            rendezvous=rendezvous,
            malloc="tuned",
            tcmalloc=None,
            oversubscribed=self.placement.oversubscribed,
            python_path=self.python_path,
        )
        argv = self.launcher.argv(
            Job(
                executable=self.executable,
                python=self.python,
                words=("-m", "payload.train.fabric", json.dumps(self._ranks(inventory))),
                environment=environment,
                world_size=self.placement.world_size,
                ranks_per_node=self.placement.ranks_per_node,
                nodes=len(inventory.nodes),
                hosts=self.folder / "hosts",
                folder=self.folder,
                rendezvous=rendezvous,
                reach=self.reach,
            )
        )
        return {
            "ssh": self.reach.ssh,
            "workers": {node.name: node.address for node in inventory.nodes[1:]},
            "hosts_file": str(self.folder / "hosts"),
            "hosts": render_hosts(inventory),
            "argv": argv,
            "environment": {**self.launcher.settings(self.reach), **environment},
            # mpirun calls mpiexec.hydra, which lies beside it, by its bare name.
            "path": str(PurePath(argv[0]).parent),
            "without": FOREIGN_PREFIXES,
            "keeps": self.launcher.keeps,
            "deadline_s": DEADLINE_S,
        }

    def _ranks(self, inventory: ClusterInventory) -> dict[str, Any]:
        ranks = [
            {
                "node": rank.node,
                "node_rank": rank.node_rank,
                "local_rank": rank.local_rank,
                "cores": rank.cores,
                "threads": rank.threads,
                "interface": self.interfaces[rank.node],
            }
            for rank in self.placement.ranks
        ]
        settings = self.launcher.rank_settings(nodes=len(inventory.nodes))
        # In place of what the launcher sets, as the wrapper of a run's rank does it.
        settings |= {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}
        return {"deadline_s": _RANKS_END_S, "ranks": ranks, "environment": settings}
