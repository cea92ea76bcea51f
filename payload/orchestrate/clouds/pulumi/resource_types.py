"""Pulumi's names for the types of Google's resources."""

from __future__ import annotations

from payload.orchestrate.clouds.pulumi.events import type_of

BUCKET = "gcp:storage/bucket:Bucket"
FILESTORE = "gcp:filestore/instance:Instance"
FIREWALL = "gcp:compute/firewall:Firewall"
INSTANCE = "gcp:compute/instance:Instance"
_WORDS = {
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


def kind_in_words(urn: str) -> str:
    """Return a resource's type as people say it: firewall rule."""
    kind = type_of(urn)
    return _WORDS.get(kind, kind.rpartition(":")[2].lower() or "resource")
