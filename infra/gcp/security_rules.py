"""The security rules, for the policy pack, the tests and docs/reference/security_rules.md.

A rule checks plain resources, as Pulumi records them, and yields problems. Numbers refer to the
CIS Google Cloud Foundations Benchmark 4.0.0, checkov and Trivy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from infra.gcp import security_checks as check
from infra.gcp.security_checks import Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One security rule."""

    name: str
    holds: str
    """The requirement as a sentence."""
    types: tuple[str, ...]
    """Patterns for the last part of the resource types to check."""
    problems: Callable[[Resource], Iterator[str]] | None = None
    """Yields the problems of one resource."""
    stack_problems: Callable[[Sequence[Resource]], Iterator[str]] | None = None
    """Yields the problems of all resources together."""
    cis: str = ""
    tools: str = ""
    """Names of this rule in other scanners."""
    level: Literal["mandatory", "advisory"] = "mandatory"
    """Advisory if an access mode violates it; docs/reference/security_rules.md gives the reason."""


RULES = (
    Rule(
        name="own-network",
        cis="3.1",
        tools="CKV_GCP_27, CKV2_GCP_18, GCP-0010, GCP-0073",
        holds="no resource is in the default network",
        types=("Network", "Subnetwork", "Firewall", "Router", "Instance"),
        problems=check.default_network,
    ),
    Rule(
        name="custom-subnets",
        cis="3.2",
        tools="CKV2_GCP_2",
        holds="the network creates no subnets automatically and is not a legacy network",
        types=("Network",),
        problems=check.automatic_subnets,
    ),
    Rule(
        name="ssh-source",
        cis="3.6",
        tools="CKV_GCP_2, GCP-0071, GCP-0027",
        holds="SSH is allowed only from Google's proxy, from the operator's addresses and from the "
        "nodes",
        types=("Firewall",),
        problems=check.ssh_from_internet,
    ),
    Rule(
        name="no-rdp",
        cis="3.7",
        tools="CKV_GCP_3, GCP-0070",
        holds="the port of RDP, 3389, is closed",
        types=("Firewall",),
        problems=check.rdp,
    ),
    Rule(
        name="flow-logs",
        cis="3.8",
        tools="CKV_GCP_26, GCP-0029, GCP-0076",
        holds="all network flows of the subnet are logged, in intervals of 5 seconds",
        types=("Subnetwork",),
        problems=check.flow_logs,
    ),
    Rule(
        name="proxy-only",
        cis="3.10",
        holds="SSH from outside comes only through Google's proxy",
        types=("Firewall",),
        problems=check.ssh_not_from_proxy,
        level="advisory",
    ),
    Rule(
        name="narrow-ingress",
        tools="CKV2_GCP_12, CKV_GCP_75, CKV_GCP_77, CKV_GCP_88, CKV_GCP_106, GCP-0072, GCP-0074",
        holds="a rule that allows ingress names its ports and limits its source",
        types=("Firewall",),
        problems=check.wide_ingress,
    ),
    Rule(
        name="narrow-egress",
        tools="GCP-0035",
        holds="egress to public addresses is limited to web traffic",
        types=("Firewall",),
        problems=check.wide_egress,
    ),
    Rule(
        name="egress-denied",
        tools="GCP-0035",
        holds="a rule denies all egress that no other rule allows",
        types=("Firewall",),
        stack_problems=check.egress_not_denied,
    ),
    Rule(
        name="closed-without-nat",
        tools="GCP-0035",
        holds="without NAT, egress is limited to restricted.googleapis.com, and a private DNS zone "
        "maps googleapis.com to this name",
        types=("Firewall", "RouterNat", "ManagedZone"),
        stack_problems=check.open_without_nat,
    ),
    Rule(
        name="private-google-access",
        tools="CKV_GCP_74, GCP-0075",
        holds="Google's APIs are reachable without an external address",
        types=("Subnetwork",),
        problems=check.private_google_access,
    ),
    Rule(
        name="own-account",
        cis="4.1",
        tools="CKV_GCP_30, GCP-0044",
        holds="a machine runs as the cluster's own service account",
        types=("Instance",),
        problems=check.default_account,
    ),
    Rule(
        name="narrow-scope",
        cis="4.2",
        tools="CKV_GCP_31, GCP-0044",
        holds="a machine's access tokens are limited to some of Google's APIs",
        types=("Instance",),
        problems=check.full_scope,
    ),
    Rule(
        name="least-roles",
        cis="1.5, 5.1",
        tools="CKV_GCP_28, CKV_GCP_41, CKV_GCP_42, CKV_GCP_46, CKV_GCP_49, CKV_GCP_117, GCP-0001, "
        "GCP-0006, GCP-0007, GCP-0011",
        holds="the cluster grants only two kinds of permissions: on the runs of one bucket, and to "
        "Google's service agents on one key",
        types=("*IAM*",),
        problems=check.roles,
    ),
    Rule(
        name="no-project-keys",
        cis="4.3",
        tools="CKV_GCP_32, GCP-0030",
        holds="the project's SSH keys cannot log in",
        types=("Instance",),
        problems=check.metadata_is("block-project-ssh-keys", "TRUE"),
    ),
    Rule(
        name="os-login",
        cis="4.4",
        tools="CKV_GCP_33, CKV_GCP_34, GCP-0042, GCP-0036",
        holds="OS Login decides who can log in",
        types=("Instance",),
        problems=check.metadata_is("enable-oslogin", "TRUE"),
        level="advisory",
    ),
    Rule(
        name="no-serial-port",
        cis="4.5",
        tools="CKV_GCP_35, GCP-0032",
        holds="login on the serial port is disabled",
        types=("Instance",),
        problems=check.metadata_is("serial-port-enable", "FALSE"),
    ),
    Rule(
        name="no-forwarding",
        cis="4.6",
        tools="CKV_GCP_36, GCP-0043",
        holds="a machine forwards no packets of other machines",
        types=("Instance",),
        problems=check.forwarding,
    ),
    Rule(
        name="no-plain-disk-keys",
        tools="CKV_GCP_37, CKV_GCP_38, GCP-0033, GCP-0034, GCP-0037",
        holds="a disk is encrypted with a key of Google or a key in Cloud KMS, never with a key in "
        "plain text",
        types=("Instance", "Disk"),
        problems=check.plain_disk_keys,
    ),
    Rule(
        name="shielded",
        cis="4.8",
        tools="CKV_GCP_39, GCP-0067, GCP-0041, GCP-0045",
        holds="a machine has secure boot, a virtual TPM and integrity monitoring",
        types=("Instance",),
        problems=check.shielded,
    ),
    Rule(
        name="no-public-address",
        cis="4.9",
        tools="CKV_GCP_40, GCP-0031",
        holds="a machine has no external address",
        types=("Instance",),
        problems=check.public_address,
        level="advisory",
    ),
    Rule(
        name="confidential-whole",
        holds="if a machine is confidential, it uses TDX and does not live-migrate",
        types=("Instance",),
        problems=check.confidential,
    ),
    Rule(
        name="pinned-image",
        holds="a machine boots one fixed image, not an image family",
        types=("Instance",),
        problems=check.pinned_image,
    ),
    Rule(
        name="private-bucket",
        cis="5.1, 5.2",
        tools="CKV_GCP_29, CKV_GCP_114, GCP-0002",
        holds="access to a bucket is uniform, and the bucket cannot be made public",
        types=("Bucket",),
        problems=check.private_bucket,
    ),
    Rule(
        name="recoverable-bucket",
        holds="a bucket keeps deleted and overwritten objects for a week, and nodes cannot remove "
        "them",
        types=("Bucket",),
        problems=check.recoverable_bucket,
    ),
    Rule(
        name="private-filestore",
        holds="a Filestore instance is exported only to single addresses, and at most one of them "
        "has root access",
        types=("Filestore",),
        problems=check.private_filestore,
    ),
    Rule(
        name="no-secrets",
        holds="no resource setting contains a private key",
        types=("*",),
        problems=check.secrets,
    ),
    Rule(
        name="host-keys-published",
        holds="a machine can publish its host keys, so the commands never accept unknown keys",
        types=("Instance",),
        problems=check.metadata_is("enable-guest-attributes", "TRUE"),
    ),
    Rule(
        name="limited-life",
        holds="Google deletes a machine when its lifetime ends, and does not restart it",
        types=("Instance",),
        problems=check.limited_life,
    ),
    Rule(
        name="disk-goes-too",
        holds="a machine's disk is deleted with the machine",
        types=("Instance",),
        problems=check.disk_goes_too,
    ),
    Rule(
        name="labelled",
        holds="billed resources have labels with the cluster's name and its time of expiry",
        types=("Instance", "Filestore", "Bucket", "Disk", "Address", "ManagedZone"),
        problems=check.labelled,
    ),
)

NOT_MET: Mapping[str, str] = {
    "2.12": "the network has no DNS policy that logs queries. Such a policy needs the API "
    "dns.googleapis.com. A policy that is left over prevents the removal of the network",
    "4.7": "disks are encrypted with Google's keys, or with your key in Cloud KMS (`kmsKey`). The "
    "recommendation is a key that you send with each request",
    "4.11": "machines are confidential only if you set `confidential: true`",
    "4.12": "OS Config does not report patches, because machines run only for hours and boot a "
    "fixed image",
}
"""CIS recommendations that the program does not follow, each with the reason."""

EXCEPTIONS: Mapping[str, frozenset[str]] = {
    "oslogin": frozenset(),
    "iap": frozenset({"os-login"}),
    "direct": frozenset({"os-login", "proxy-only", "no-public-address"}),
}
"""Rules that each accessMode does not follow; docs/reference/security_rules.md has the reasons."""


def findings(resources: Sequence[Resource]) -> dict[str, list[str]]:
    """Return the problems by rule name; omit rules without problems."""
    found = {rule.name: list(rule_findings(rule, resources)) for rule in RULES}
    return {name: problems for name, problems in found.items() if problems}


def rule_findings(rule: Rule, resources: Sequence[Resource]) -> Iterator[str]:
    """Yield one rule's problems, each with the resource's name."""
    seen = [found for found in resources if applies(rule, str(found["type"]))]
    if rule.stack_problems:
        yield from rule.stack_problems(seen)
    if rule.problems:
        for resource in seen:
            yield from (f"{resource['name']}: {problem}" for problem in rule.problems(resource))


def applies(rule: Rule, resource_type: str) -> bool:
    """Return whether the rule applies to this type, such as gcp:compute/instance:Instance."""
    kind = check.kind_of(resource_type)
    return any(fnmatchcase(kind, pattern) for pattern in rule.types)
