"""Resources of a project, whose cluster each is, and the command that removes it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from payload.core.errors import ConfigError
from payload.core.one_line import printable_line
from payload.stack.cluster_identity import IDENTITY_LABEL

CLUSTER_LABEL, EXPIRES_LABEL = "tileforge-cluster", "tileforge-expires"
KEPT_LABEL = "tileforge-kept"
"""On what outlives `pulumi destroy` on purpose: the results bucket."""
RUNNING = ("RUNNING", "STAGING", "PROVISIONING", "REPAIRING")
"""Google's words for a machine that runs, and is billed."""
BUCKET, SERVICE_ACCOUNT, DNS_ZONE = "bucket", "service account", "DNS zone"
FILESTORE = "Filestore instance"
_MARK = re.compile(rf"(?<!\S)({CLUSTER_LABEL}|{IDENTITY_LABEL}|{EXPIRES_LABEL})=([a-z0-9-]+)(?!\S)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of resource in Compute Engine."""

    name: str
    """As people say it."""
    client: str
    """As the client library's classes are called: Instances, of InstancesClient."""
    singular: str
    """As the request classes are called: Instance, of DeleteInstanceRequest."""
    aggregated: bool
    """True if it is in zones or regions."""
    labelled: bool
    """True if it can have labels; else its description has what they would say."""
    gcloud: str
    """Its commands, after `gcloud compute`."""


# In the order in which they can be removed.
KINDS = (
    Kind(
        name="instance",
        client="Instances",
        singular="Instance",
        aggregated=True,
        labelled=True,
        gcloud="instances",
    ),
    Kind(
        name="forwarding rule",
        client="ForwardingRules",
        singular="ForwardingRule",
        aggregated=True,
        labelled=True,
        gcloud="forwarding-rules",
    ),
    Kind(
        name="disk",
        client="Disks",
        singular="Disk",
        aggregated=True,
        labelled=True,
        gcloud="disks",
    ),
    Kind(
        name="snapshot",
        client="Snapshots",
        singular="Snapshot",
        aggregated=False,
        labelled=True,
        gcloud="snapshots",
    ),
    Kind(
        name="image",
        client="Images",
        singular="Image",
        aggregated=False,
        labelled=True,
        gcloud="images",
    ),
    Kind(
        name="resource policy",
        client="ResourcePolicies",
        singular="ResourcePolicy",
        aggregated=True,
        labelled=False,
        gcloud="resource-policies",
    ),
    Kind(
        name="router",
        client="Routers",
        singular="Router",
        aggregated=True,
        labelled=False,
        gcloud="routers",
    ),
    Kind(
        name="address",
        client="Addresses",
        singular="Address",
        aggregated=True,
        labelled=True,
        gcloud="addresses",
    ),
    Kind(
        name="firewall rule",
        client="Firewalls",
        singular="Firewall",
        aggregated=False,
        labelled=False,
        gcloud="firewall-rules",
    ),
    Kind(
        name="subnetwork",
        client="Subnetworks",
        singular="Subnetwork",
        aggregated=True,
        labelled=False,
        gcloud="networks subnets",
    ),
    Kind(
        name="network",
        client="Networks",
        singular="Network",
        aggregated=False,
        labelled=False,
        gcloud="networks",
    ),
)
_KIND_OF = {kind.name: kind for kind in KINDS}
# What the cluster program makes that has no labels, after `<cluster>-`.
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
_ORDER = {
    name: place
    for place, name in enumerate([DNS_ZONE, FILESTORE, *_KIND_OF, SERVICE_ACCOUNT, BUCKET])
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One thing in the project."""

    kind: str
    """A Kind's name, FILESTORE, SERVICE_ACCOUNT, DNS_ZONE or BUCKET."""
    name: str
    """A service account's is its e-mail address."""
    location: str
    """Zone, region, or `global`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Or, of a kind that cannot have any, what its description says in their place."""
    created_unix: float | None = None
    network: str | None = None
    """Name of the network that it is in, where it is in one."""
    status: str | None = None
    ends_unix: float | None = None
    """Time at which Google ends the machine, while it runs and has a limit."""
    gib: int | None = None
    """Size of a Filestore instance, which is what it costs by."""

    def key(self) -> tuple[str, str, str]:
        """Return the key that identifies it."""
        return (self.kind, self.location, self.name)

    def expires_unix(self) -> float | None:
        """Return when its cluster was meant to be gone, if its label says so."""
        text = self.labels.get(EXPIRES_LABEL, "")
        return float(text) if re.fullmatch("[0-9]{1,12}", text) else None

    def removal(self, *, project: str) -> str:
        """Return the command that removes it."""
        if self.kind == BUCKET:
            return shlex.join(["gcloud", "storage", "rm", "--recursive", f"gs://{self.name}"])
        if self.kind == SERVICE_ACCOUNT:
            words = ["gcloud", "iam", "service-accounts", "delete", self.name]
            return shlex.join([*words, f"--project={project}", "--quiet"])
        if self.kind == DNS_ZONE:
            return self._zone_removal(project)
        if self.kind == FILESTORE:
            words = ["gcloud", "filestore", "instances", "delete", self.name]
            return shlex.join([*words, self._where(), f"--project={project}", "--quiet"])
        kind = _KIND_OF[self.kind]
        words = ["gcloud", "compute", *kind.gcloud.split(), "delete", self.name]
        if kind.aggregated:
            words.append(self._where())
        return shlex.join([*words, f"--project={project}", "--quiet"])

    def _zone_removal(self, project: str) -> str:
        # A zone with records cannot be removed; these two are all that infra/network.py puts there.
        records = (("restricted.googleapis.com.", "A"), ("*.googleapis.com.", "CNAME"))
        where = [f"--project={project}", "--quiet"]
        delete = ["gcloud", "dns", "record-sets", "delete"]
        commands = [
            [*delete, name, f"--type={kind}", f"--zone={self.name}", *where]
            for name, kind in records
        ]
        commands.append(["gcloud", "dns", "managed-zones", "delete", self.name, *where])
        return "; ".join(map(shlex.join, commands))

    def _where(self) -> str:
        if self.location == "global":
            return "--global"
        return f"--{'zone' if is_zone(self.location) else 'region'}={self.location}"


def is_zone(location: str) -> bool:
    """Return whether it is a zone; that is a region with a letter: us-central1-a."""
    return location.count("-") == 2


def in_order(resources: Iterable[Resource]) -> list[Resource]:
    """Return resources in the order of their removal: a network goes after what is in it."""
    return sorted(resources, key=lambda each: (_ORDER[each.kind], each.location, each.name))


def by_cluster(
    resources: Sequence[Resource], *, known: Collection[str] = ()
) -> dict[str, list[Resource]]:
    """Return each cluster's resources; what belongs to none is left out.

    A label decides. Without one it is the network: what lies in a labelled one, such as a firewall
    rule that somebody added, belongs to its cluster. Then it is the whole name, which has to be one
    that the cluster program gives, in the network that it makes; `known` are clusters that no label
    names. A name that only begins like a cluster's is somebody else's.
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
    """Return whether label or name say that it was built for a cluster of this name."""
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


def marks(description: str) -> dict[str, str]:
    """Return the labels that the description of something without labels stands in for."""
    return dict(_MARK.findall(description))


def printable_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels as a table may show them."""
    return {printable_line(str(key)): printable_line(str(value)) for key, value in labels.items()}


def expiry_of(resources: Sequence[Resource]) -> float | None:
    """Return when a cluster is to be gone: the latest of its labels and its machines' limits.

    A machine that was started again lives longer than its label says.
    """
    times = [time for r in resources for time in (r.expires_unix(), r.ends_unix)]
    return max((time for time in times if time is not None), default=None)


def last_word(url: str | None) -> str:
    """Return `us-central1-a` of a URL that ends with it."""
    return (url or "").rpartition("/")[2]


def parse_time(text: str | None) -> float | None:
    """Return the Unix time of an RFC 3339 text, or None."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except (OverflowError, ValueError):
        return None


def check_cluster_name(name: str) -> str:
    """Return the name, if labels can have it. Raises ConfigError."""
    plain = name.isascii() and name.replace("-", "").isalnum() and name == name.lower()
    if not (plain and name[0].isalpha() and len(name) <= 63):
        raise ConfigError(
            f"--cluster {name!r}: a cluster's name has up to 63 lower-case letters, digits and "
            "hyphens, a letter first."
        )
    return name
