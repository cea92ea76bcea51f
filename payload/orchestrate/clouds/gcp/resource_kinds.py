"""The kinds of resources in a project, and the states of machines."""

from __future__ import annotations

from dataclasses import dataclass

RUNNING = ("RUNNING", "STAGING", "PROVISIONING", "REPAIRING")
"""States in which a machine runs and Google bills it."""
BUCKET, SERVICE_ACCOUNT, DNS_ZONE = "bucket", "service account", "DNS zone"
FILESTORE = "Filestore instance"
SAVED = ("snapshot", "image")
"""Kinds that are copies of disks. The cluster program makes no copies, so a person made them to
keep data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of Compute Engine resource."""

    name: str
    """The kind's name in messages."""
    client: str
    """The kind's name in client classes, such as Instances in InstancesClient."""
    singular: str
    """The kind's name in request classes, such as Instance in DeleteInstanceRequest."""
    aggregated: bool
    """True if resources of this kind are in zones or regions."""
    labelled: bool
    """True if this kind can have labels; otherwise the description contains the labels."""
    gcloud: str
    """Command group after `gcloud compute`."""


# Sorted in the order of removal.
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
KIND_OF = {kind.name: kind for kind in KINDS}

STOPPED, ENDING = ("TERMINATED", "STOPPED", "SUSPENDED"), ("STOPPING", "SUSPENDING")
"""Google's states of a machine: states in which it is stopped but keeps the disk, and states in
which it is stopping."""
