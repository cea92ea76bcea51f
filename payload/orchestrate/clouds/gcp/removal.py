"""Removes resources of a project in order, and waits until each is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby

from payload.core.errors import TileforgeError
from payload.orchestrate.clouds.gcp.client import REQUEST_S, CloudMissingError, Google, request_of
from payload.orchestrate.clouds.gcp.compute_operations import operation_deadline, wait_for_operation
from payload.orchestrate.clouds.gcp.dns_zones import remove_dns_zone
from payload.orchestrate.clouds.gcp.filestore_instances import begin_to_remove_filestore
from payload.orchestrate.clouds.gcp.listing import collect_errors, snake
from payload.orchestrate.clouds.gcp.removal_order import Resource, in_order, is_zone
from payload.orchestrate.clouds.gcp.resource_kinds import (
    BUCKET,
    DNS_ZONE,
    FILESTORE,
    KINDS,
    SERVICE_ACCOUNT,
)
from payload.orchestrate.clouds.gcp.service_accounts import remove_service_account


def remove(google: Google, resources: Sequence[Resource]) -> list[str]:
    """Remove the resources, except buckets, one kind after another; return the error messages.

    Resources of one kind are removed in parallel. A removal can take minutes, and machines cost
    money during this time.
    """
    failed: list[str] = []
    going = in_order(each for each in resources if each.kind != BUCKET)
    for _, alike in groupby(going, key=lambda each: each.kind):
        ends: list[Callable[[], None]] = []
        for resource in alike:
            # If a resource is missing, another program has removed it.
            with collect_errors(failed, TileforgeError), suppress(CloudMissingError):
                ends.append(_begin_to_remove(google, resource))
        for wait in ends:
            with collect_errors(failed, TileforgeError), suppress(CloudMissingError):
                wait()
    return failed


def _begin_to_remove(google: Google, resource: Resource) -> Callable[[], None]:
    """Request a resource's removal; return a function that waits until the resource is removed."""
    for known, way in ((SERVICE_ACCOUNT, remove_service_account), (DNS_ZONE, remove_dns_zone)):
        if resource.kind == known:
            way(google, resource.name)
            return lambda: None
    if resource.kind == FILESTORE:
        return begin_to_remove_filestore(google, resource)
    kind = next(kind for kind in KINDS if kind.name == resource.kind)
    client_name, singular = kind.client, kind.singular
    place, operations = {"project": google.project}, "Global"
    if kind.aggregated and resource.location == "global":
        client_name, singular = f"Global{client_name}", f"Global{singular}"
    elif kind.aggregated:
        operations = "Zone" if is_zone(resource.location) else "Region"
        place[operations.lower()] = resource.location
    request = request_of(
        f"Delete{singular}Request", **place, **{snake(kind.singular): resource.name}
    )
    client = google.compute(client_name)
    what = f"removing {kind.name} {resource.name}"
    operation = google.call(
        what, lambda: client.delete_unary(request=request, retry=None, timeout=REQUEST_S)
    )
    ends = operation_deadline()
    return partial(
        wait_for_operation, google, operation, what, operations=operations, place=place, ends=ends
    )
