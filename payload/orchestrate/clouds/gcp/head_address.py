"""The head's external address, which a stop and a start change."""

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


def follow_head(paths: RunPaths, env: Mapping[str, str]) -> str:
    """Write how the head is reached now into the copy of a run; return words where that is new.

    A stop and a start give a machine another external address, and another `accessMode` takes or
    gives one. Empty where nothing is new, or where Google does not say.
    """
    try:
        was = ClusterInventory.load(paths.inventory)
        if was.source != "pulumi" or was.project is None or was.head.instance_id is None:
            return ""
        # Once: whoever waits for the head asks again.
        google = Google(was.project, endpoints=Endpoints.from_env(env), retry_s=0)
        found = compute_instance(google, was.head)
    except TileforgeError:
        return ""
    address = external_address(found)
    access = Access(kind="direct") if address else Access(kind="iap", project=was.project)
    head = replace(was.head, external_address=address)
    now = replace(was, access=access, nodes=(head, *was.nodes[1:]))
    # Another machine of that name has no part of the run.
    if str(found.id) != head.instance_id or found.status != "RUNNING" or now == was:
        return ""
    write_whole(paths.inventory, now.to_json())
    return (
        f"it is reached {_way(head)} now, not {_way(was.head)}. The run's inventory.json has that "
        "from now on, and the next attempt uses it"
    )


def _way(head: Node) -> str:
    return f"at {head.external_address}" if head.external_address else "through Google's proxy"


def external_address(instance: Any) -> str | None:
    """Return the external address of one of Compute Engine's instances, or None."""
    interfaces = [each for each in instance.network_interfaces if each.access_configs]
    return str(interfaces[0].access_configs[0].nat_i_p) or None if interfaces else None
