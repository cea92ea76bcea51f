"""Whose a resource is: by the cluster's identity, or by the stack's own state. Pure.

A name and the label with it are anyone's to take, so they prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from payload.orchestrate.clouds.gcp.cluster_of_resource import is_made_by_program
from payload.orchestrate.clouds.gcp.removal_order import Resource, in_order, is_zone
from payload.orchestrate.clouds.gcp.resource_kinds import BUCKET, FILESTORE, KINDS, SERVICE_ACCOUNT
from payload.stack.cluster_identity import identity_in

NO_IDENTITY = "none"
"""Stands for the identity of what an older version built, or a person by hand."""
_COLLECTIONS = {kind.name: kind.client[0].lower() + kind.client[1:] for kind in KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Proof that resources are a cluster's own."""

    identities: frozenset[str] = frozenset()
    """The folder's own; NO_IDENTITY stands for what was built without one."""
    cluster: str = ""
    """Its name: what NO_IDENTITY stands for has to be labelled or called so."""
    known: tuple[str, ...] = ()
    """Ids in the stack's state."""
    project: str = ""
    """The project that the resources are in: a name of another one's in an id proves nothing."""

    @property
    def is_known(self) -> bool:
        """Tell whether anything could be proven at all."""
        return bool(self.identities or self.known)

    def owns(self, resource: Resource) -> bool:
        """Tell whether it may be adopted or removed as the cluster's own."""
        identity = identity_in(resource.labels)
        if identity is not None:
            # An id has a name and no more: by now another cluster's resource may have it.
            return identity in self.identities
        nameless = NO_IDENTITY in self.identities and is_made_by_program(resource, self.cluster)
        return nameless or self.lists(resource)

    def belies(self, resource: Resource) -> bool:
        """Tell whether the stack's state lists it, although it is another cluster's by now."""
        identity = identity_in(resource.labels)
        return identity is not None and identity not in self.identities and self.lists(resource)

    def lists(self, resource: Resource) -> bool:
        """Tell whether the stack's state has it, or has the machine whose boot disk it is."""
        return any(is_same(resource, known, project=self.project) for known in self.known)

    def split(self, resources: Iterable[Resource]) -> tuple[list[Resource], list[Resource]]:
        """Return those that are the cluster's own, and the others."""
        own: list[Resource] = []
        others: list[Resource] = []
        for each in resources:
            (own if self.owns(each) else others).append(each)
        return own, others


def removable(resources: Iterable[Resource]) -> list[Resource]:
    """Return in the order of removal what a cleanup may remove: no bucket."""
    return in_order(each for each in resources if each.kind != BUCKET)


def is_same(resource: Resource, known: str, *, project: str) -> bool:
    """Tell whether an id of Pulumi's state, such as projects/P/zones/Z/instances/N, is this.

    The resource is in `project`. A boot disk has its machine's name and place, and no entry of its
    own. A bucket's id is its name, which is its own in all projects.
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
    """Return a line for each identity that is not ours: what has it, and since when it exists."""
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
