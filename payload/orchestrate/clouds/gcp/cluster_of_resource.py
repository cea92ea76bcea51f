"""Maps each resource of a project to its cluster, by label, network or name, in pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from payload.core.errors import (
    ConfigError,
)
from payload.orchestrate.clouds.gcp.removal_order import Resource, in_order
from payload.stack.resource_labels import CLUSTER_LABEL

# Suffixes after `<cluster>-` in names of the program's resources that cannot have labels.
_ENDINGS = {
    "resource policy": ("placement",),
    "router": ("router",),
    "firewall rule": (
        *("allow-ssh", "allow-nodes", "deny-egress"),
        *("egress-web", "egress-nodes", "egress-filestore"),
    ),
    "subnetwork": ("subnet",),
    "network": ("network",),
}


def by_cluster(
    resources: Sequence[Resource], *, known: Collection[str] = ()
) -> dict[str, list[Resource]]:
    """Return each cluster's resources; resources without a cluster are left out.

    The cluster is found in this order: 1. by the resource's label; 2. by the label of its network,
    as for firewall rules that a person added; 3. by its full name, if the cluster program creates a
    resource of that name in the cluster's network. `known` has names of further clusters, which may
    be in no label. A common name prefix alone does not assign a resource to a cluster.
    """
    labelled = {r.labels[CLUSTER_LABEL] for r in resources if CLUSTER_LABEL in r.labels}
    names = labelled | set(known)
    networks = {r.name: r.labels.get(CLUSTER_LABEL) for r in resources if r.kind == "network"}
    found: dict[str, list[Resource]] = {}
    for resource in resources:
        owner = (
            resource.labels.get(CLUSTER_LABEL)
            or networks.get(resource.network or "")
            or _owner_by_name(resource, names)
        )
        if owner is not None:
            found.setdefault(owner, []).append(resource)
    return {name: in_order(found[name]) for name in sorted(found)}


def is_made_by_program(resource: Resource, cluster: str) -> bool:
    """Return whether the label or name proves that the resource was built for a cluster of this
    name."""
    labelled = resource.labels.get(CLUSTER_LABEL)
    return labelled == cluster or (
        labelled is None and _owner_by_name(resource, {cluster}) is not None
    )


def _owner_by_name(resource: Resource, names: Collection[str]) -> str | None:
    for ending in _ENDINGS.get(resource.kind, ()):
        cluster = resource.name.removesuffix(f"-{ending}")
        own_network = resource.network in (None, f"{cluster}-network")
        if cluster != resource.name and cluster in names and own_network:
            return cluster
    return None


def expiry_of(resources: Sequence[Resource]) -> float | None:
    """Return a cluster's expiry in Unix seconds: the latest time in labels or time limits of
    machines.

    A machine that was stopped and restarted runs longer than its label states.
    """
    times = [time for r in resources for time in (r.expires_unix(), r.ends_unix)]
    return max((time for time in times if time is not None), default=None)


def check_cluster_name(name: str) -> str:
    """Return the name if it is valid as a label's value. Raises ConfigError."""
    plain = name.isascii() and name.replace("-", "").isalnum() and name == name.lower()
    if not (plain and name[0].isalpha() and len(name) <= 63):
        raise ConfigError(
            f"--cluster {name!r}: must be up to 63 lower-case letters, digits and hyphens, and "
            "start with a letter."
        )
    return name
