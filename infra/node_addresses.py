"""Names and addresses of the cluster's nodes, which are set before anything is built."""

from __future__ import annotations

import ipaddress

from infra.config import ClusterConfig

SUBNET = "10.60.0.0/24"
FILESTORE_RANGE = "10.60.1.0/26"
"""Address range of a Filestore instance, outside the subnet; the zonal tier needs a /26."""
FIRST_HOST = 10
"""Host number of the head in the subnet; the workers' numbers follow."""


def node_name(config: ClusterConfig, index: int) -> str:
    """Return the name of a node in the inventory, which is also the name of its instance."""
    return f"{config.cluster}-node-{index}"


def node_address(index: int) -> str:
    """Return a node's internal address, which stays the same if the node is rebuilt."""
    return str(ipaddress.ip_network(SUBNET)[FIRST_HOST + index])
