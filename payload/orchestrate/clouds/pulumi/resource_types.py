"""Pulumi's types of Google Cloud resources, with names for messages."""

from __future__ import annotations

from payload.orchestrate.clouds.pulumi.events import type_of

BUCKET = "gcp:storage/bucket:Bucket"
FILESTORE = "gcp:filestore/instance:Instance"
FIREWALL = "gcp:compute/firewall:Firewall"
INSTANCE = "gcp:compute/instance:Instance"
_NAMES = {
    INSTANCE: "machine",
    "gcp:compute/network:Network": "network",
    "gcp:compute/subnetwork:Subnetwork": "subnetwork",
    "gcp:compute/router:Router": "router",
    "gcp:compute/routerNat:RouterNat": "NAT",
    FIREWALL: "firewall rule",
    "gcp:compute/resourcePolicy:ResourcePolicy": "placement policy",
    "gcp:serviceaccount/account:Account": "service account",
    BUCKET: "bucket",
    FILESTORE: "Filestore instance",
    "gcp:storage/bucketIAMMember:BucketIAMMember": "bucket permission",
    "gcp:dns/managedZone:ManagedZone": "DNS zone",
    "gcp:dns/recordSet:RecordSet": "DNS record",
    "gcp:kms/cryptoKeyIAMMember:CryptoKeyIAMMember": "key permission",
    "pulumi:providers:gcp": "provider",
}


def kind_name(urn: str) -> str:
    """Return the name of a resource's type in messages, such as `firewall rule`."""
    kind = type_of(urn)
    return _NAMES.get(kind, kind.rpartition(":")[2].lower() or "resource")
