"""An inventory of machines that do not exist yet, for `plan` alone."""

from __future__ import annotations

from dataclasses import replace

from payload.core.errors import ConfigError, UsageError
from payload.machines.inventory import Access, ClusterInventory, Node
from payload.machines.machine import Domain
from payload.machines.machine_types import machine_type
from payload.orchestrate.inventories.chosen import ResolvedInventory
from payload.pricing.cluster_cost import cluster_cost
from payload.stack.cloud_requirements import requirements_of

PLANNED = "planned"
"""Name of the cluster in an inventory of planned machines."""


def machines_like(
    head: Node, *, domains: tuple[Domain, ...] | None, nodes: int
) -> ResolvedInventory:
    """Return `nodes` machines like `head`, each with the NUMA domains `domains`.

    Raises UsageError.
    """
    found = _inventory(_named(head, nodes), why=f"{nodes} node(s) like {head.name}")
    if domains is None:
        return found
    return replace(found, domains={node.name: domains for node in found.inventory.nodes})


def machines_of_type(name: str, *, nodes: int) -> ResolvedInventory:
    """Return `nodes` machines of a Google machine type, with their price in the default region.

    Raises ConfigError for an unknown type, and UsageError.
    """
    try:
        kind = machine_type(name)
    except ConfigError as error:
        raise ConfigError(f"--machine-type {name}: {error}") from None
    need = requirements_of({"machineType": name, "nodeCount": nodes})
    cost = cluster_cost(need.billed(spot=not kind.has_on_demand))
    usd = cost.hourly_usd
    gpu = None if kind.gpus is None else kind.gpus.gpu
    node = Node(
        name="node",
        address="node",
        zone=need.zones[0],
        machine_type=name,
        physical_cores=kind.physical_cores,
        numa_domains=kind.numa_domains,
        memory_gib=kind.memory_gib,
        gpus=0 if kind.gpus is None else kind.gpus.count,
        gpu_memory_gib=None if gpu is None else round(gpu.memory_mib / 1024, 2),
        gpu_capability=None if gpu is None else ".".join(map(str, gpu.capability)),
        # A share of the disks and of NAT is included: the sum is the price of the cluster.
        hourly_usd=None if usd is None else usd / max(1, nodes),
    )
    price = "price unknown" if usd is None else f"${usd:.2f}/h"
    return _inventory(_named(node, nodes), why=f"{need.describe()}, {price}")


def _named(node: Node, nodes: int) -> tuple[Node, ...]:
    if nodes < 1:
        raise UsageError(f"--nodes {nodes}: must be 1 or more.")
    names = (f"node-{index}" for index in range(nodes))
    return tuple(replace(node, name=name, address=name, external_address=None) for name in names)


def _inventory(nodes: tuple[Node, ...], *, why: str) -> ResolvedInventory:
    inventory = ClusterInventory(
        cluster=PLANNED,
        source="file",
        ssh_user="trainer",
        access=Access(kind="direct"),
        nodes=nodes,
    )
    return ResolvedInventory(inventory=inventory, why=why, domains={})
