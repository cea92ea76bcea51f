"""The head node's external address, which changes when the machine is stopped and started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from payload.core.errors import TileforgeError
from payload.core.files import write_whole
from payload.machines.inventory import Access, ClusterInventory, Node
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.compute_resource import compute_instance
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.run_record.run_files import RunPaths


def update_head_address(paths: RunPaths, env: Mapping[str, str]) -> str:
    """Update the head's address in a run's inventory; return a message if it changed.

    The external address changes when the machine is stopped and started, or when `accessMode`
    changes. Return an empty string if the address is unchanged, or if Google cannot be queried.
    """
    try:
        was = ClusterInventory.load(paths.inventory)
        if was.source != "pulumi" or was.project is None or was.head.instance_id is None:
            return ""
        # No retries: the caller polls.
        google = Google(was.project, endpoints=Endpoints.from_env(env), retry_s=0)
        found = compute_instance(google, was.head)
    except TileforgeError:
        return ""
    address = external_address(found)
    access = Access(kind="direct") if address else Access(kind="iap", project=was.project)
    head = replace(was.head, external_address=address)
    now = replace(was, access=access, nodes=(head, *was.nodes[1:]))
    # A new machine of the same name does not have the run's files.
    if str(found.id) != head.instance_id or found.status != "RUNNING" or now == was:
        return ""
    write_whole(paths.inventory, now.to_json())
    return (
        f"now reached {_way(head)}, not {_way(was.head)}. The run's inventory.json is updated, "
        "and the next attempt uses the new address"
    )


def _way(head: Node) -> str:
    return f"at {head.external_address}" if head.external_address else "through Google's proxy"


def external_address(instance: Any) -> str | None:
    """Return the external address of a Compute Engine instance, or None."""
    interfaces = [each for each in instance.network_interfaces if each.access_configs]
    return str(interfaces[0].access_configs[0].nat_i_p) or None if interfaces else None
