"""Inventories for tests."""

from __future__ import annotations

from payload.machines.inventory import Access, ClusterInventory, Node


def make_inventory(
    *, num_nodes: int = 1, physical_cores: int = 4, numa_domains: int = 1
) -> ClusterInventory:
    """A cluster of equal nodes."""
    return ClusterInventory(
        cluster="test",
        source="file",
        ssh_user="trainer",
        access=Access(kind="local"),
        bucket=None,
        nodes=tuple(
            Node(
                name=f"node-{i}",
                address=f"10.0.0.{i + 2}",
                physical_cores=physical_cores,
                numa_domains=numa_domains,
                memory_gib=32.0,
            )
            for i in range(num_nodes)
        ),
    )
