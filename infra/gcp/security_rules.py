"""The security rules, once: for the policy pack, for the tests and for docs/security.md.

A rule looks at plain resources, as Pulumi records them, and says what is wrong. Numbers are of
the CIS Google Cloud Foundations Benchmark 4.0.0, checkov and Trivy.
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
    """One thing that has to hold."""

    name: str
    holds: str
    """In words."""
    types: tuple[str, ...]
    """Last words of the resource types that it looks at, as patterns."""
    problems: Callable[[Resource], Iterator[str]] | None = None
    """Yields the problems of one resource."""
    stack_problems: Callable[[Sequence[Resource]], Iterator[str]] | None = None
    """Yields the problems of all of them together."""
    cis: str = ""
    tools: str = ""
    """Other scanners' names for it."""
    level: Literal["mandatory", "advisory"] = "mandatory"
    """Advisory where one of the access modes goes another way, and docs/security.md says why."""


RULES = (
    Rule(
        name="own-network",
        cis="3.1",
        tools="CKV_GCP_27, CKV2_GCP_18, GCP-0010, GCP-0073",
        holds="nothing is in the default network",
        types=("Network", "Subnetwork", "Firewall", "Router", "Instance"),
        problems=check.default_network,
    ),
    Rule(
        name="custom-subnets",
        cis="3.2",
        tools="CKV2_GCP_2",
        holds="the network makes no subnets by itself and is no legacy one",
        types=("Network",),
        problems=check.automatic_subnets,
    ),
    Rule(
        name="ssh-source",
        cis="3.6",
        tools="CKV_GCP_2, GCP-0071, GCP-0027",
        holds="SSH comes from Google's proxy, the operator's addresses or the nodes themselves",
        types=("Firewall",),
        problems=check.ssh_from_internet,
    ),
    Rule(
        name="no-rdp",
        cis="3.7",
        tools="CKV_GCP_3, GCP-0070",
        holds="port 3389 is closed",
        types=("Firewall",),
        problems=check.rdp,
    ),
    Rule(
        name="flow-logs",
        cis="3.8",
        tools="CKV_GCP_26, GCP-0029, GCP-0076",
        holds="all of the subnet's flows are logged, every 5 seconds",
        types=("Subnetwork",),
        problems=check.flow_logs,
    ),
    Rule(
        name="proxy-only",
        cis="3.10",
        holds="SSH from outside comes through Google's proxy alone",
        types=("Firewall",),
        problems=check.ssh_not_from_proxy,
        level="advisory",
    ),
    Rule(
        name="narrow-ingress",
        tools="CKV2_GCP_12, CKV_GCP_75, CKV_GCP_77, CKV_GCP_88, CKV_GCP_106, GCP-0072, GCP-0074",
        holds="what may enter names its ports and does not come from everywhere",
        types=("Firewall",),
        problems=check.wide_ingress,
    ),
    Rule(
        name="narrow-egress",
        tools="GCP-0035",
        holds="what may leave for everywhere is web traffic alone",
        types=("Firewall",),
        problems=check.wide_egress,
    ),
    Rule(
        name="egress-denied",
        tools="GCP-0035",
        holds="a rule denies all that is not let out by another",
        types=("Firewall",),
        stack_problems=check.egress_not_denied,
    ),
    Rule(
        name="closed-without-nat",
        tools="GCP-0035",
        holds="without NAT nothing leaves but for restricted.googleapis.com, by a DNS zone",
        types=("Firewall", "RouterNat", "ManagedZone"),
        stack_problems=check.open_without_nat,
    ),
    Rule(
        name="private-google-access",
        tools="CKV_GCP_74, GCP-0075",
        holds="Google's APIs are reached without an address on the internet",
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
        holds="a machine's tokens are not for all of Google's APIs",
        types=("Instance",),
        problems=check.full_scope,
    ),
    Rule(
        name="least-roles",
        cis="1.5, 5.1",
        tools="CKV_GCP_28, CKV_GCP_41, CKV_GCP_42, CKV_GCP_46, CKV_GCP_49, CKV_GCP_117, GCP-0001, "
        "GCP-0006, GCP-0007, GCP-0011",
        holds="the only rights given are to the runs of one bucket, and of Google's service "
        "agents to one key",
        types=("*IAM*",),
        problems=check.roles,
    ),
    Rule(
        name="no-project-keys",
        cis="4.3",
        tools="CKV_GCP_32, GCP-0030",
        holds="the project's SSH keys do not log in",
        types=("Instance",),
        problems=check.metadata_is("block-project-ssh-keys", "TRUE"),
    ),
    Rule(
        name="os-login",
        cis="4.4",
        tools="CKV_GCP_33, CKV_GCP_34, GCP-0042, GCP-0036",
        holds="who may log in is decided by OS Login",
        types=("Instance",),
        problems=check.metadata_is("enable-oslogin", "TRUE"),
        level="advisory",
    ),
    Rule(
        name="no-serial-port",
        cis="4.5",
        tools="CKV_GCP_35, GCP-0032",
        holds="nobody can log in on the serial port",
        types=("Instance",),
        problems=check.metadata_is("serial-port-enable", "FALSE"),
    ),
    Rule(
        name="no-forwarding",
        cis="4.6",
        tools="CKV_GCP_36, GCP-0043",
        holds="a machine forwards no packets of others",
        types=("Instance",),
        problems=check.forwarding,
    ),
    Rule(
        name="no-plain-disk-keys",
        tools="CKV_GCP_37, CKV_GCP_38, GCP-0033, GCP-0034, GCP-0037",
        holds="a disk's key is Google's or in Cloud KMS, never text in the settings",
        types=("Instance", "Disk"),
        problems=check.plain_disk_keys,
    ),
    Rule(
        name="shielded",
        cis="4.8",
        tools="CKV_GCP_39, GCP-0067, GCP-0041, GCP-0045",
        holds="secure boot, virtual TPM and integrity monitoring are on",
        types=("Instance",),
        problems=check.shielded,
    ),
    Rule(
        name="no-public-address",
        cis="4.9",
        tools="CKV_GCP_40, GCP-0031",
        holds="a machine has no address on the internet",
        types=("Instance",),
        problems=check.public_address,
        level="advisory",
    ),
    Rule(
        name="confidential-whole",
        holds="a confidential machine is TDX and is not moved (being one is optional)",
        types=("Instance",),
        problems=check.confidential,
    ),
    Rule(
        name="pinned-image",
        holds="a machine boots a named image, not a family that changes",
        types=("Instance",),
        problems=check.pinned_image,
    ),
    Rule(
        name="private-bucket",
        cis="5.1, 5.2",
        tools="CKV_GCP_29, CKV_GCP_114, GCP-0002",
        holds="a bucket has uniform access and can never be public",
        types=("Bucket",),
        problems=check.private_bucket,
    ),
    Rule(
        name="recoverable-bucket",
        holds="a bucket keeps for a week what was deleted or overwritten, also against a node",
        types=("Bucket",),
        problems=check.recoverable_bucket,
    ),
    Rule(
        name="private-filestore",
        holds="a Filestore instance is for named addresses alone, and root of one at most",
        types=("Filestore",),
        problems=check.private_filestore,
    ),
    Rule(
        name="no-secrets",
        holds="no private key is in any setting of any resource",
        types=("*",),
        problems=check.secrets,
    ),
    Rule(
        name="host-keys-published",
        holds="a machine can publish its host keys, so that none is accepted unseen",
        types=("Instance",),
        problems=check.metadata_is("enable-guest-attributes", "TRUE"),
    ),
    Rule(
        name="limited-life",
        holds="Google deletes a machine at the limit of its run time, and does not restart it",
        types=("Instance",),
        problems=check.limited_life,
    ),
    Rule(
        name="disk-goes-too",
        holds="a machine's disk is deleted with it",
        types=("Instance",),
        problems=check.disk_goes_too,
    ),
    Rule(
        name="labelled",
        holds="what costs carries the cluster's name and the time of its end",
        types=("Instance", "Filestore", "Bucket", "Disk", "Address", "ManagedZone"),
        problems=check.labelled,
    ),
)

NOT_MET: Mapping[str, str] = {
    "2.12": "the network has no DNS policy that logs queries: it needs the API dns.googleapis.com, "
    "and a policy that is left keeps the network from being removed",
    "4.7": "disks have Google's keys, or with `kmsKey` yours in Cloud KMS, and none that you send "
    "with each request",
    "4.11": "machines are confidential with `confidential: true` alone",
    "4.12": "machines live for hours and boot a named image; OS Config reports no patches",
}
"""CIS recommendations for kinds of resources that the program makes, and why it does not follow."""

EXCEPTIONS: Mapping[str, frozenset[str]] = {
    "oslogin": frozenset(),
    "iap": frozenset({"os-login"}),
    "direct": frozenset({"os-login", "proxy-only", "no-public-address"}),
}
"""By accessMode: the rules that it does not keep. docs/security.md says why."""


def findings(resources: Sequence[Resource]) -> dict[str, list[str]]:
    """Return the problems by the rule's name; rules that hold are left out."""
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
    """Return True if the rule is for resources of this type (gcp:compute/instance:Instance)."""
    kind = check.kind_of(resource_type)
    return any(fnmatchcase(kind, pattern) for pattern in rule.types)
