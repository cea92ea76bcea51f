"""Decides who owns a resource, by the cluster's identity or the stack's state.

Names and labels of clusters prove nothing, because any user can choose the same name and labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from payload.orchestrate.clouds.gcp.cluster_of_resource import is_made_by_program
from payload.orchestrate.clouds.gcp.removal_order import Resource, in_order, is_zone
from payload.orchestrate.clouds.gcp.resource_kinds import (
    BUCKET,
    FILESTORE,
    KINDS,
    SAVED,
    SERVICE_ACCOUNT,
)
from payload.stack.cluster_identity import identity_in

NO_IDENTITY = "none"
"""Identity of resources that were built by an older version, or by hand."""
_COLLECTIONS = {kind.name: kind.client[0].lower() + kind.client[1:] for kind in KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Evidence that decides whether a cluster owns a resource."""

    identities: frozenset[str] = frozenset()
    """Identities of this folder's cluster; NO_IDENTITY represents resources without an identity."""
    cluster: str = ""
    """The cluster's name; a resource without an identity needs this name in its label or name."""
    known: tuple[str, ...] = ()
    """Resource IDs in the stack's state."""
    project: str = ""
    """The project of the resources; IDs in other projects prove nothing."""

    @property
    def is_known(self) -> bool:
        """Return whether there is any proof."""
        return bool(self.identities or self.known)

    def owns(self, resource: Resource) -> bool:
        """Return whether the cluster owns the resource, and may thus adopt or remove it."""
        identity = identity_in(resource.labels)
        if identity is not None:
            # The identity precedes the stack's state: an ID in the state is a name, which another
            # cluster can use now.
            return identity in self.identities
        nameless = NO_IDENTITY in self.identities and is_made_by_program(resource, self.cluster)
        return nameless or self.lists(resource)

    def belies(self, resource: Resource) -> bool:
        """Return whether the resource is in the stack's state, but now belongs to another
        cluster."""
        identity = identity_in(resource.labels)
        return identity is not None and identity not in self.identities and self.lists(resource)

    def lists(self, resource: Resource) -> bool:
        """Return whether the stack's state lists the resource or, for a boot disk, its machine."""
        return any(matches_id(resource, known, project=self.project) for known in self.known)

    def split(self, resources: Iterable[Resource]) -> tuple[list[Resource], list[Resource]]:
        """Return two lists: the cluster's own resources, and all others."""
        own: list[Resource] = []
        others: list[Resource] = []
        for each in resources:
            (own if self.owns(each) else others).append(each)
        return own, others


def removable(resources: Iterable[Resource]) -> list[Resource]:
    """Return the resources that a cleanup can remove, in order.

    Buckets, disk snapshots and disk images are left out, because they were made to keep data.
    """
    return in_order(each for each in resources if each.kind not in (BUCKET, *SAVED))


def matches_id(resource: Resource, known: str, *, project: str) -> bool:
    """Return whether an ID in Pulumi's state identifies the resource.

    `known` is the ID, such as projects/P/zones/Z/instances/N. `project` is the resource's
    project. A boot disk has no separate entry in the state, but has the name and zone of its
    machine. A bucket's ID is its name, which is unique across projects.
    """
    if resource.kind == BUCKET:
        return known == resource.name
    collection = _COLLECTIONS.get(resource.kind, "managedZones")
    place = "global/"
    if resource.location != "global":
        place = f"{'zones' if is_zone(resource.location) else 'regions'}/{resource.location}/"
    if resource.kind == FILESTORE:
        collection, place = "instances", f"locations/{resource.location}/"
    elif resource.kind == SERVICE_ACCOUNT:
        collection, place = "serviceAccounts", ""
    elif collection == "managedZones":
        place = ""
    collections = (collection, "instances") if collection == "disks" else (collection,)
    return any(known == f"projects/{project}/{place}{each}/{resource.name}" for each in collections)


def describe_others(resources: Sequence[Resource]) -> list[str]:
    """Return a line for each foreign identity, with its resources and the oldest creation time."""
    groups: dict[str, list[Resource]] = {}
    for each in in_order(resources):
        groups.setdefault(identity_in(each.labels) or NO_IDENTITY, []).append(each)
    lines = []
    for identity, found in sorted(groups.items()):
        names = ", ".join(f"{each.kind} {each.name}" for each in found)
        times = [each.created_unix for each in found if each.created_unix is not None]
        first = datetime.fromtimestamp(min(times), UTC) if times else None
        since = f" since {first:%Y-%m-%d %H:%M} UTC" if first else ""
        whose = "without an identity" if identity == NO_IDENTITY else f"of identity {identity}"
        lines.append(f"{whose}{since}: {names}")
    return lines
