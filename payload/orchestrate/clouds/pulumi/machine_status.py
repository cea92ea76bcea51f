"""Finds a cluster's machines in the stack's state and in Google's list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from payload.core.errors import CloudError, ExitCode, TileforgeError
from payload.core.suggested_commands import command
from payload.orchestrate.clouds.gcp.check_result import Check, unknown
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.listing import list_machines
from payload.orchestrate.clouds.gcp.machine_start import NO_END
from payload.orchestrate.clouds.gcp.ownership import Ownership
from payload.orchestrate.clouds.gcp.removal import remove
from payload.orchestrate.clouds.gcp.removal_order import Resource
from payload.orchestrate.clouds.gcp.stopped_machines import stopped_machines
from payload.orchestrate.clouds.pulumi.cli_errors import PulumiError
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import type_of
from payload.orchestrate.clouds.pulumi.resource_types import INSTANCE
from payload.orchestrate.clouds.pulumi.stack_state import StackState, stack_state

_ID = re.compile(r"projects/([^/]+)/zones/(?P<zone>[^/]+)/instances/(?P<name>[^/]+)")
CLOCK_SLACK_S = 60.0
"""Largest expected time, in seconds, by which this machine's clock is ahead of Google's clock."""
_UP = command("orchestrate", "up")
_DOWN = command("orchestrate", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMachines:
    """The machines of a cluster, from Google's list and the stack's state."""

    names: tuple[str, ...]
    older: tuple[str, ...]
    """Machines that are missing in the stack's state and existed before the operation started."""


def cluster_machines(
    google: Google, own: Ownership, state: StackState, *, since_unix: float
) -> ClusterMachines:
    """Return the machines that the cluster owns or that the stack's state lists.

    The operation started at `since_unix`. Raises CloudAuthError, and CloudError if a zone could
    not be listed.
    """
    labelled = [each for each in list_machines(google) if own.owns(each)]
    return ClusterMachines(
        names=tuple(dict.fromkeys([*state.machines, *(each.name for each in labelled)])),
        older=tuple(
            each.name
            for each in labelled
            if each.name not in state.machines
            and (each.created_unix or 0.0) < since_unix - CLOCK_SLACK_S
        ),
    )


def places_in(state: StackState, *, project: str) -> dict[tuple[str, str], str]:
    """Return the URNs of the project's machines in the stack's state, by machine name and zone."""
    found = {}
    for urn, known in state.parts:
        place = _ID.fullmatch(known or "")
        if type_of(urn) == INSTANCE and place is not None and place[1] == project:
            found[place["name"], place["zone"]] = urn
    return found


def check_machines(google: Google, pulumi: Pulumi) -> Iterator[Check]:
    """Check that the stack's machines run; yield nothing if there is no stack."""
    try:
        places = places_in(stack_state(pulumi), project=google.project)
        found = stopped_machines(google, places)
    except PulumiError as error:
        if error.is_fault:
            yield unknown("machines", error)
        return
    except TileforgeError as error:
        yield unknown("machines", error)
        return
    for each in found:
        why = f" ({each.reason})" if each.reason else ""
        yield Check(
            name=f"machine {each.name}",
            outcome="error",
            found=f"{each.status}{why}; its disk is kept and billed, {NO_END}",
            fix=f"Start or replace the machine: {_UP}; or download its results and destroy the "
            f"cluster: {_DOWN}",
            exit_code=ExitCode.PREFLIGHT,
        )
    if places and not found:
        yield Check(name="machines", outcome="ok", found=f"{len(places)} checked, none stopped")


def remove_machines(google: Google, state: StackState) -> None:
    """Remove only the stack's machines. Raises CloudError if a removal fails."""
    failed = remove(
        google,
        [
            Resource(kind="instance", name=name, location=zone)
            for name, zone in places_in(state, project=google.project)
        ],
    )
    if failed:
        raise CloudError("; ".join(failed))
