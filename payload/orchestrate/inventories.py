"""Which cluster a command works on, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from payload.errors import ConfigError
from payload.inventory import ClusterInventory
from payload.launch.ranks import Domain
from payload.orchestrate.cloud.pulumi_cli import Pulumi
from payload.orchestrate.cloud.stack import StackOutputs, default_stack, load_stack, read_outputs
from payload.orchestrate.console import text_console
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


def require_one_machine(chosen: Chosen) -> None:
    """Raises ConfigError when the inventory is not of one node of access kind `local`."""
    inventory = chosen.inventory
    if inventory.access.kind != "local" or len(inventory.nodes) > 1:
        raise ConfigError(
            f"inventory ({chosen.why}): access kind {inventory.access.kind!r} with "
            f"{len(inventory.nodes)} node(s); 'local' is for one node, this machine. Use 'direct' "
            "or 'iap' for others."
        )


def load_cluster(argument: str | None, *, env: Mapping[str, str]) -> Chosen:
    """The cluster that `--inventory` names; without it, the selected stack's or this machine.

    A stack's machines are asked for their host keys. Raises ConfigError, and what `load_stack`
    raises.
    """
    if argument == "local":
        return _this_machine("--inventory local")
    if argument is None:
        found = default_stack(env, folder=Path.cwd())
        if isinstance(found, str):
            return _this_machine(f"this machine, the default: {found}")
        return _of_stack(found, env, why="the selected Pulumi stack, the default")
    if _is_stack(argument):
        name = argument.partition(":")[2] if ":" in argument else None
        outputs = read_outputs(Pulumi(env, folder=Path.cwd(), stack=name))
        return _of_stack(outputs, env, why=f"--inventory {argument}")
    inventory = ClusterInventory.load(Path(argument))
    return Chosen(inventory=inventory, why=f"--inventory {argument}", domains={})


def _is_stack(argument: str) -> bool:
    return argument == "stack" or argument.startswith("stack:")


def _this_machine(why: str) -> Chosen:
    machine = discover()
    return Chosen(inventory=machine.inventory(), why=why, domains={machine.name: machine.domains})


def _of_stack(outputs: StackOutputs, env: Mapping[str, str], *, why: str) -> Chosen:
    talk = text_console(stderr=True)
    talk.print(f"cluster {outputs.inventory.cluster} ({why}): looking for its machines")
    inventory = load_stack(outputs, env, folder=Path.cwd(), say=talk.print)
    return Chosen(inventory=inventory, why=f"{why}; {outputs.price_and_end()}", domains={})
