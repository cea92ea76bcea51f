"""The stack output `inventory`, in the format of `payload.machines.inventory`."""

from __future__ import annotations

import json
from typing import Any

from pulumi import Output

from infra.cloud_init import NODE_USER
from infra.config import ClusterConfig
from infra.gcp.nodes import ClusterNodes
from infra.gcp.storage import ResultsBucket, bucket_output
from infra.node_addresses import node_address, node_name
from payload.machines.inventory import Access, ClusterInventory, Node
from payload.machines.machine_types import MachineType
from payload.pricing.cluster_cost import Cost


def inventory_output(
    config: ClusterConfig, cost: Cost, *, nodes: ClusterNodes, results: ResultsBucket
) -> Output[dict[str, Any]]:
    """Return the stack's output `inventory`.

    The inventory contains no host keys. A node creates its host keys at boot and publishes them as
    guest attributes (namespace `hostkeys`); the orchestrator reads them through Google's API.
    """
    return Output.all(nodes.head_external_address(), bucket_output(results)).apply(
        lambda known: as_plain(
            inventory_of(config, cost, head_external_address=known[0], bucket=known[1])
        )
    )


def inventory_of(
    config: ClusterConfig, cost: Cost, *, head_external_address: str | None, bucket: str | None
) -> ClusterInventory:
    """Return the inventory from the settings and the values that Google assigned."""
    machine = config.machine()
    direct, os_login = config.access_mode == "direct", config.access_mode == "oslogin"
    return ClusterInventory(
        cluster=config.cluster,
        source="pulumi",
        ssh_user=config.os_login_user if os_login else NODE_USER,
        access=Access(kind="direct") if direct else Access(kind="iap", project=config.project),
        bucket=bucket,
        nodes=tuple(
            Node(
                name=node_name(config, index),
                address=node_address(index),
                external_address=head_external_address if index == 0 else None,
                zone=config.zone,
                machine_type=machine.name,
                physical_cores=machine.physical_cores,
                numa_domains=machine.numa_domains,
                memory_gib=machine.memory_gib,
                **_gpu_fields(machine),
                hourly_usd=price,
            )
            for index, price in enumerate(cost.nodes())
        ),
    )


def _gpu_fields(machine: MachineType) -> dict[str, Any]:
    """Return the GPU fields of a node; empty for a node without GPUs."""
    if machine.gpus is None:
        return {}
    gpu = machine.gpus.gpu
    return {
        "gpus": machine.gpus.count,
        "gpu_memory_gib": round(gpu.memory_mib / 1024, 2),
        "gpu_capability": ".".join(map(str, gpu.capability)),
    }


def as_plain(inventory: ClusterInventory) -> dict[str, Any]:
    """Return the inventory as plain lists and dictionaries, as in inventory.json."""
    plain: dict[str, Any] = json.loads(inventory.to_json())
    return plain
