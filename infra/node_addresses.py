"""Names and addresses of the cluster's nodes: known before anything is built."""

from __future__ import annotations

import ipaddress

from infra.config import ClusterConfig

SUBNET = "10.60.0.0/24"
FILESTORE_RANGE = "10.60.1.0/26"
"""Range of a Filestore instance's addresses, beside the subnet; the zonal tier needs a /26."""
FIRST_HOST = 10
"""The head's last number within the subnet; the workers' follow."""


def node_name(config: ClusterConfig, index: int) -> str:
    """Name of an instance, and of the node in the inventory."""
    return f"{config.cluster}-node-{index}"


def node_address(index: int) -> str:
    """Address within the network: known before boot, and kept when the node is rebuilt."""
    return str(ipaddress.ip_network(SUBNET)[FIRST_HOST + index])
