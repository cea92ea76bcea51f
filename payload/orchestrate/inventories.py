"""Which cluster a command works on, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from payload.errors import ConfigError
from payload.inventory import ClusterInventory
from payload.launch.ranks import Domain
from payload.orchestrate.discovery import discover


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An inventory, and what is known of its nodes' cores."""

    inventory: ClusterInventory
    why: str
    domains: dict[str, tuple[Domain, ...]]
    """By node; empty for nodes whose cores are simply 0 to n-1."""

    def headline(self) -> str:
        """The first line that a command prints."""
        nodes = self.inventory.nodes
        cores = sum(node.physical_cores for node in nodes)
        domains = sum(node.numa_domains for node in nodes)
        memory = sum(node.memory_gib for node in nodes)
        names = ", ".join(node.name for node in nodes)
        return (
            f"inventory: {self.inventory.cluster} ({self.why}): {names}; {cores} physical core(s) "
            f"in {domains} NUMA domain(s), {memory:g} GiB"
        )


def choose_inventory(argument: str | None) -> Chosen:
    """The one machine that `--inventory` names; without it, this machine. Raises ConfigError."""
    chosen = load_cluster(argument)
    require_one_machine(chosen)
    return chosen


def require_one_machine(chosen: Chosen) -> None:
    """Raises ConfigError when the inventory is not of one node of access kind `local`."""
    inventory = chosen.inventory
    if inventory.access.kind != "local" or len(inventory.nodes) > 1:
        raise ConfigError(
            f"inventory ({chosen.why}): access kind {inventory.access.kind!r} with "
            f"{len(inventory.nodes)} node(s); 'local' is for one node, this machine. Use 'direct' "
            "or 'iap' for others."
        )


def load_cluster(argument: str | None) -> Chosen:
    """The cluster that `--inventory` names; without it, this machine. Raises ConfigError."""
    if argument is None or argument == "local":
        machine = discover()
        return Chosen(
            inventory=machine.inventory(),
            why="this machine, the default" if argument is None else "--inventory local",
            domains={machine.name: machine.domains},
        )
    if argument == "stack" or argument.startswith("stack:"):
        raise ConfigError(
            f"--inventory {argument}: this release reads `local` and FILE only. Use --inventory "
            "local, or name an inventory.json."
        )
    inventory = ClusterInventory.load(Path(argument))
    return Chosen(inventory=inventory, why=f"--inventory {argument}", domains={})
