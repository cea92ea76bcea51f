"""Checks the security rules with pure functions over plain resource inputs."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from infra.google_address_ranges import IAP_RANGE, RESTRICTED
from payload.stack.google_name_patterns import KMS_ROLE
from payload.stack.resource_labels import CLUSTER_LABEL, EXPIRES_LABEL

Resource = Mapping[str, Any]
"""A dictionary with `type`, `name` and `inputs`, with names as in Pulumi."""

NOT_KNOWN = "(known after up)"
"""Placeholder in a preview for a value that Google assigns."""
_BUCKET_ROLE = "roles/storage.objectUser"
# Google's service agents of a project, which no user can impersonate.
_SERVICE_AGENT = re.compile(
    r"serviceAccount:service-[0-9]+@(compute-system|gs-project-accounts|cloud-filer)"
    r"\.iam\.gserviceaccount\.com"
)
_EVERYONE = frozenset({"allUsers", "allAuthenticatedUsers"})
# Required by recommendation 3.8 of the CIS benchmark.
_FLOW_LOGS = {
    "aggregationInterval": "INTERVAL_5_SEC",
    "flowSampling": 1,
    "metadata": "INCLUDE_ALL_METADATA",
}
_WEEK_S = 7 * 86_400
_WEB_PORTS = frozenset({"80", "443"})
_NAMED_IMAGE = re.compile(r"(.*/)?projects/[^/]+/global/images/(?!family/)[^/]+")


def default_network(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule own-network."""
    inputs = resource["inputs"]
    named = [inputs.get("network"), inputs.get("subnetwork")]
    for interface in inputs.get("networkInterfaces") or []:
        named += [interface.get("network"), interface.get("subnetwork")]
        if not interface.get("subnetwork"):
            yield "an interface has no subnetwork, so it is in the default network"
    if any(str(name).rpartition("/")[2] == "default" for name in named if name):
        yield "is in the default network"


def automatic_subnets(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule custom-subnets."""
    if resource["inputs"].get("autoCreateSubnetworks") is not False:
        yield "creates subnets automatically; set autoCreateSubnetworks to false"


def ssh_from_internet(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule ssh-source."""
    for source in _sources_into(resource, 22):
        network = _network(source)
        if source != IAP_RANGE and network and network.num_addresses > 256:
            yield f"allows SSH from {source}"


def ssh_not_from_proxy(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule proxy-only."""
    for source in _sources_into(resource, 22):
        if source != IAP_RANGE:
            yield f"allows SSH from {source}, bypassing Google's proxy"


def rdp(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule no-rdp."""
    for source in _sources_into(resource, 3389):
        yield f"allows RDP from {source}"


def flow_logs(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule flow-logs."""
    logs = resource["inputs"].get("logConfig")
    if not logs:
        yield "logs no flows"
        return
    for key, expected in _FLOW_LOGS.items():
        if logs.get(key) != expected:
            yield f"logs flows with {key} {logs.get(key)!r}, not {expected!r}"


def wide_ingress(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule narrow-ingress."""
    if not _is_allow(resource, "INGRESS"):
        return
    inputs = resource["inputs"]
    networks = [_network(source) for source in _ranges(inputs)]
    if any(network and network.prefixlen == 0 for network in networks):
        yield "is open to the whole internet"
    if not any(inputs.get(key) for key in ("sourceRanges", "sourceServiceAccounts", "sourceTags")):
        yield "has no source, which means any address"
    for allow in inputs["allows"]:
        protocol = _protocol(allow)
        if protocol not in ("tcp", "udp", "icmp"):
            yield f"allows incoming protocol {protocol}"
        elif protocol != "icmp" and _is_all_ports(allow):
            yield f"allows all incoming ports of {protocol}"


def wide_egress(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule narrow-egress."""
    inputs = resource["inputs"]
    if not _is_allow(resource, "EGRESS"):
        return
    ranges = inputs.get("destinationRanges") or ["0.0.0.0/0"]
    networks = [_network(text) for text in ranges]
    if all(network is None or network.is_private for network in networks):
        return
    for allow in inputs["allows"]:
        ports, protocol = set(allow.get("ports") or ["all"]), _protocol(allow)
        if protocol != "tcp" or not ports <= _WEB_PORTS:
            yield f"allows {protocol} {', '.join(sorted(ports))} to {', '.join(ranges)}"


def egress_not_denied(resources: Sequence[Resource]) -> Iterator[str]:
    """Yield networks without a rule that denies egress."""
    firewalls = [found["inputs"] for found in resources]
    closed = {
        inputs.get("network")
        for inputs in firewalls
        if inputs.get("direction") == "EGRESS"
        and "0.0.0.0/0" in (inputs.get("destinationRanges") or [])
        and any(_protocol(deny) == "all" for deny in inputs.get("denies") or [])
        and not inputs.get("targetServiceAccounts")
        and not inputs.get("targetTags")
        and not inputs.get("disabled")
    }
    for network in sorted({str(inputs.get("network")) for inputs in firewalls} - closed):
        yield f"network {network}: no rule denies egress to 0.0.0.0/0"


def open_without_nat(resources: Sequence[Resource]) -> Iterator[str]:
    """Yield violations of the rule closed-without-nat."""
    kinds = {_kind(found) for found in resources}
    if "Firewall" not in kinds or "RouterNat" in kinds:
        return
    for found in resources:
        if _kind(found) == "Firewall" and _is_allow(found, "EGRESS"):
            ranges = found["inputs"].get("destinationRanges") or ["0.0.0.0/0"]
            wide = [text for text in map(str, ranges) if not _is_closed(_network(text))]
            if wide:
                yield f"{found['name']}: allows egress to {', '.join(wide)} without NAT"
    zones = [found["inputs"] for found in resources if _kind(found) == "ManagedZone"]
    if not any(
        zone.get("dnsName") == "googleapis.com." and zone.get("visibility") == "private"
        for zone in zones
    ):
        yield "no private DNS zone maps googleapis.com to restricted.googleapis.com without NAT"


def _is_closed(network: ipaddress.IPv4Network | ipaddress.IPv6Network | None) -> bool:
    """Return whether the range is private, restricted.googleapis.com, or not yet known."""
    restricted = ipaddress.IPv4Network(RESTRICTED)
    if isinstance(network, ipaddress.IPv4Network) and network.subnet_of(restricted):
        return True
    return network is None or network.is_private


def private_google_access(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule private-google-access."""
    if resource["inputs"].get("privateIpGoogleAccess") is not True:
        yield "cannot reach Google's APIs without NAT; set privateIpGoogleAccess"


def default_account(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule own-account."""
    email = (resource["inputs"].get("serviceAccount") or {}).get("email")
    if not email or str(email).endswith("-compute@developer.gserviceaccount.com"):
        yield "runs as the project's default service account"


def full_scope(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule narrow-scope."""
    for scope in (resource["inputs"].get("serviceAccount") or {}).get("scopes") or []:
        if scope.rpartition("/")[2] in ("cloud-platform", "cloud-platform.read-only", "compute"):
            yield f"has access tokens of scope {scope}"


def roles(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule least-roles."""
    inputs = resource["inputs"]
    role = inputs.get("role")
    if (_kind(resource), role) == ("CryptoKeyIAMMember", KMS_ROLE):
        member = inputs.get("member")
        if member != NOT_KNOWN and not _SERVICE_AGENT.fullmatch(str(member)):
            yield f"grants {role} to {member}, which is not a service agent"
    elif (_kind(resource), role) != ("BucketIAMMember", _BUCKET_ROLE):
        yield f"grants {role or 'a whole policy'} with {kind_of(str(resource['type']))}"
    elif not _is_of_runs((inputs.get("condition") or {}).get("expression")):
        yield f"grants {role} on every object of the bucket, not only runs/"
    for member in [inputs.get("member"), *(inputs.get("members") or [])]:
        if member in _EVERYONE:
            yield f"grants {role} to {member}"


def _is_of_runs(expression: Any) -> bool:
    return expression == NOT_KNOWN or "/objects/runs/" in str(expression)


def metadata_is(key: str, expected: str) -> Callable[[Resource], Iterator[str]]:
    """Return a check that a machine's metadata has the value `expected` for `key`."""

    def check(resource: Resource) -> Iterator[str]:
        value = (resource["inputs"].get("metadata") or {}).get(key)
        if str(value).upper() != expected:
            yield f"metadata {key} is {value!r}, not {expected}"

    return check


def forwarding(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule no-forwarding."""
    if resource["inputs"].get("canIpForward"):
        yield "forwards packets of other machines"


def plain_disk_keys(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule no-plain-disk-keys."""
    inputs = resource["inputs"]
    disks = [inputs.get("bootDisk") or {}, *(inputs.get("attachedDisks") or []), inputs]
    for disk in disks:
        for key in ("diskEncryptionKeyRaw", "diskEncryptionKeyRsa"):
            if disk.get(key):
                yield f"has {key} in plain text"


def shielded(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule shielded."""
    settings = resource["inputs"].get("shieldedInstanceConfig") or {}
    for key in ("enableSecureBoot", "enableVtpm", "enableIntegrityMonitoring"):
        if settings.get(key) is not True:
            yield f"{key} is off"


def public_address(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule no-public-address."""
    for interface in resource["inputs"].get("networkInterfaces") or []:
        if interface.get("accessConfigs") or interface.get("ipv6AccessConfigs"):
            yield "has an external address"


def confidential(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule confidential-whole."""
    settings = resource["inputs"].get("confidentialInstanceConfig")
    if not settings:
        return
    if settings.get("confidentialInstanceType") != "TDX":
        yield f"is confidential with {settings.get('confidentialInstanceType')}, not TDX"
    if (resource["inputs"].get("scheduling") or {}).get("onHostMaintenance") != "TERMINATE":
        yield "is confidential, but would live-migrate at host maintenance"


def pinned_image(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule pinned-image."""
    parameters = (resource["inputs"].get("bootDisk") or {}).get("initializeParams") or {}
    if not _NAMED_IMAGE.fullmatch(str(parameters.get("image"))):
        yield f"boots {parameters.get('image')}, which is not a fixed image"


def private_bucket(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule private-bucket."""
    if resource["inputs"].get("uniformBucketLevelAccess") is not True:
        yield "has per-object access control; set uniformBucketLevelAccess"
    if resource["inputs"].get("publicAccessPrevention") != "enforced":
        yield "can be made public; set publicAccessPrevention to enforced"


def private_filestore(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule private-filestore."""
    inputs = resource["inputs"]
    options = (inputs.get("fileShares") or {}).get("nfsExportOptions") or []
    if not options:
        yield "is exported to the whole network; set nfsExportOptions"
    for option in options:
        ranges = option.get("ipRanges") or ["0.0.0.0/0"]
        if any(ipaddress.ip_network(each).num_addresses > 1 for each in ranges):
            yield f"is exported to address ranges: {', '.join(ranges)}"
        if option.get("squashMode") != "ROOT_SQUASH" and len(ranges) > 1:
            yield "allows root access from several machines; set squashMode to ROOT_SQUASH"


def recoverable_bucket(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule recoverable-bucket."""
    inputs = resource["inputs"]
    kept_s = (inputs.get("softDeletePolicy") or {}).get("retentionDurationSeconds")
    if kept_s != NOT_KNOWN and (not isinstance(kept_s, (int, float)) or kept_s < _WEEK_S):
        yield "does not keep deleted objects for a week; set softDeletePolicy"
    if (inputs.get("versioning") or {}).get("enabled"):
        yield (
            "keeps object versions: nodes can delete them, and deleted objects are billed twice as "
            "long as without versions"
        )


def secrets(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule no-secrets."""
    if "PRIVATE KEY" in json.dumps(resource["inputs"], default=str):
        yield "contains a private key"


def limited_life(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule limited-life."""
    scheduling = resource["inputs"].get("scheduling") or {}
    if not (scheduling.get("maxRunDuration") or {}).get("seconds"):
        yield "has no run time limit"
    if scheduling.get("instanceTerminationAction") != "DELETE":
        yield "is not deleted at its limit or when preempted"
    if scheduling.get("automaticRestart") is not False:
        yield "restarts automatically, which resets its run time"


def disk_goes_too(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule disk-goes-too."""
    if (resource["inputs"].get("bootDisk") or {}).get("autoDelete") is not True:
        yield "leaves its disk behind"


def labelled(resource: Resource) -> Iterator[str]:
    """Yield violations of the rule labelled."""
    inputs = resource["inputs"]
    places = {"": inputs.get("labels")}
    if _kind(resource) == "Instance":
        disk = (inputs.get("bootDisk") or {}).get("initializeParams") or {}
        places["its disk "] = disk.get("labels")
    for place, labels in places.items():
        for label in (CLUSTER_LABEL, EXPIRES_LABEL):
            if not (labels or {}).get(label):
                yield f"{place}lacks the label {label}"


def _kind(resource: Resource) -> str:
    return kind_of(str(resource["type"]))


def kind_of(resource_type: str) -> str:
    """Return the last part of a resource's type; for a Filestore instance, return `Filestore`."""
    is_filestore = resource_type.startswith("gcp:filestore/")
    return "Filestore" if is_filestore else resource_type.rpartition(":")[2]


def _is_allow(resource: Resource, direction: str) -> bool:
    inputs = resource["inputs"]
    given = inputs.get("direction", "INGRESS")
    return given == direction and bool(inputs.get("allows")) and not inputs.get("disabled")


def _ranges(inputs: Mapping[str, Any]) -> list[str]:
    return [str(source) for source in inputs.get("sourceRanges") or []]


def _sources_into(resource: Resource, port: int) -> Iterator[str]:
    """Yield the address ranges from which this TCP port is open."""
    if not _is_allow(resource, "INGRESS"):
        return
    for allow in resource["inputs"]["allows"]:
        if _protocol(allow) in ("tcp", "all", "6") and _has_port(allow, port):
            yield from _ranges(resource["inputs"])


def _has_port(allow: Mapping[str, Any], port: int) -> bool:
    for text in allow.get("ports") or ["0-65535"]:
        ports = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", str(text))
        if ports and int(ports[1]) <= port <= int(ports[2] or ports[1]):
            return True
    return False


def _protocol(entry: Mapping[str, Any]) -> str:
    return str(entry.get("protocol", "all"))


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the address range, or None if the text is not a range or not yet known."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _is_all_ports(allow: Mapping[str, Any]) -> bool:
    return all(_has_port(allow, port) for port in (1, 1024, 10_000, 65_535))
