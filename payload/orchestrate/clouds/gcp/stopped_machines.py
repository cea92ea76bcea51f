"""Finds stopped machines and the reason for each stop.

At host maintenance Google stops a machine with compact placement and keeps its disk. The lifetime
limit is paused while a machine is stopped, so Google never deletes a stopped machine:
https://cloud.google.com/compute/docs/instances/limit-vm-runtime
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from payload.core.errors import CloudAuthError, CloudError, TileforgeError
from payload.core.one_line import joined_lines
from payload.core.suggested_commands import command
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.clouds.gcp.client import Google, request_of
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.orchestrate.clouds.gcp.listing import list_machines
from payload.orchestrate.clouds.gcp.ownership import Ownership
from payload.orchestrate.clouds.gcp.resource_kinds import ENDING, STOPPED

_UP = command("orchestrate", "up")
_DOWN = command("orchestrate", "down")

# Descriptions of the operation types that stop a machine.
_BY_GOOGLE = {
    "compute.instances.terminateOnHostMaintenance": "Google's host maintenance stopped it",
    "compute.instances.hostError": "a failure of Google's host stopped it",
    "compute.instances.preempted": "Google preempted it",
}
_BY_OTHERS = {
    "compute.instances.guestTerminate": "it was shut down by its operating system",
    "stop": "{user} stopped it",
    "suspend": "{user} suspended it",
}
_LINKS = "https://www.googleapis.com/compute/v1/"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedMachine:
    """A machine that exists but does not run."""

    name: str
    zone: str
    status: str
    """Google's state, such as TERMINATED."""
    reason: str = ""
    """Description of the cause; empty if unknown."""
    by_google: bool = False
    """True if Google stopped the machine; if False, a person can have stopped it on purpose."""

    def __str__(self) -> str:
        return f"{self.name} is {self.status}" + (f" ({self.reason})" if self.reason else "")


def stopped_machines(
    google: Google, places: Collection[tuple[str, str]], *, own: Ownership | None = None
) -> list[StoppedMachine]:
    """Return the stopped or stopping machines among `places` (name and zone).

    With `own`, only machines that the cluster owns are returned. Raises CloudAuthError, and
    CloudError if a zone could not be listed.
    """
    if not places:
        return []
    return [
        _with_reason(google, StoppedMachine(name=each.name, zone=each.location, status=each.status))
        for each in list_machines(google)
        if (each.name, each.location) in places
        and each.status in (*STOPPED, *ENDING)
        and (own is None or own.owns(each))
    ]


def _with_reason(google: Google, machine: StoppedMachine) -> StoppedMachine:
    """Return the machine with the reason of its last stop; Google keeps reasons for 14 days."""
    place = f"projects/{google.project}/zones/{machine.zone}/instances/{machine.name}"
    request = request_of(
        "ListZoneOperationsRequest",
        project=google.project,
        zone=machine.zone,
        # The filter needs the full URL: for a partial URL it finds nothing and reports no error.
        filter=f'targetLink="{_LINKS}{place}"',
        max_results=500,
    )
    client = google.compute("ZoneOperations")
    try:
        found = [
            each
            for page in google.pages(
                f"{machine.name}: reading the reason for its stop", client.list, request
            )
            for each in page.items
            if each.target_link.endswith(f"/{place}")
            and each.operation_type in _BY_GOOGLE.keys() | _BY_OTHERS.keys()
        ]
    except (CloudError, CloudAuthError):
        return machine
    if not found:
        return machine
    newest = max(found, key=lambda each: each.insert_time)
    by_google = _BY_GOOGLE.get(newest.operation_type)
    other = _BY_OTHERS.get(newest.operation_type, "").format(user=newest.user or "a user")
    when = joined_lines(newest.insert_time)
    return replace(
        machine,
        reason=joined_lines(f"{by_google or other}, {when}" if when else by_google or other),
        by_google=by_google is not None,
    )


def stopped_machine_lines(inventory: ClusterInventory, env: Mapping[str, str]) -> list[str]:
    """Return a line for each stopped machine of the inventory.

    If Google cannot be queried, one line reports the error. There are no lines for a cluster that
    is not in Google Cloud.
    """
    if inventory.source != "pulumi" or inventory.project is None:
        return []
    places = {(node.name, node.zone or "") for node in inventory.nodes}
    try:
        google = Google(inventory.project, endpoints=Endpoints.from_env(env))
        found = stopped_machines(google, places)
    except TileforgeError as error:
        return [f"note: cannot check for stopped machines: {error}"]
    return [f"machine {each}. Start it: {_UP}; or collect and destroy: {_DOWN}" for each in found]
