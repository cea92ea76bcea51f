"""Computes a node's bootstrap values from the settings, for clusters and for test machines."""

from __future__ import annotations

from dataclasses import replace

from infra.cloud_init import BootstrapFiles, NodeBootstrap, render_user_data
from infra.config import ClusterConfig
from infra.node_addresses import SUBNET, node_address, node_name

_ANY_KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 43} any-operator"
"""A placeholder for the operator's key, so that the user-data does not depend on the operator's
key."""


def node_bootstrap(
    config: ClusterConfig, *, authorized_keys: tuple[str, ...], version: str
) -> NodeBootstrap:
    """Return the bootstrap values of the cluster's nodes."""
    is_monitored = config.monitoring == "prometheus"
    extras = ["train"]
    extras += ["monitor"] if is_monitored else []
    # Runs store results in the cluster's bucket, which needs Google's client library.
    extras += ["storage"] if config.bucket != "none" else []
    return NodeBootstrap(
        authorized_keys=authorized_keys,
        version=version,
        extras=",".join(extras),
        is_monitored=is_monitored,
        nodes=tuple(
            (node_name(config, index), node_address(index)) for index in range(config.node_count)
        )
        if is_monitored or config.shared_storage != "none"
        else (),
        has_gpus=config.machine().gpus is not None,
        shared=config.shared_storage,
        shared_clients=SUBNET if config.shared_storage == "nfs" else "",
        wheelhouse=config.wheelhouse or None,
        os_login_user=config.os_login_user or None,
    )


def user_data(
    config: ClusterConfig,
    files: BootstrapFiles,
    *,
    authorized_keys: tuple[str, ...],
    version: str,
) -> str:
    """Return the nodes' user-data. Raises ConfigError."""
    node = node_bootstrap(config, authorized_keys=authorized_keys, version=version)
    return render_user_data(node, files)


def rebuild_triggers(
    config: ClusterConfig, files: BootstrapFiles, *, has_keys: bool, version: str
) -> tuple[str, str]:
    """Return the user-data of the head and of a worker; a changed text rebuilds the machine.

    A change of the operator's key or of the number of nodes affects only new machines. Exception:
    with monitoring, the head is replaced if the number of nodes changes, because Prometheus on the
    head needs every node's address.
    """
    keys = (_ANY_KEY,) if has_keys else ()
    single = user_data(replace(config, node_count=1), files, authorized_keys=keys, version=version)
    if config.monitoring == "none":
        return single, single
    return user_data(config, files, authorized_keys=keys, version=version), single
