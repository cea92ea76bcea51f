"""infra/role.yaml has exactly the permissions that the requests of all commands need.

The requests are recorded by the stand-in, and from Google's provider. The permissions of each are
from the method's page in Google's reference (`Required permissions`).
"""

from __future__ import annotations

import re

import pytest
import yaml

from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.stacks import Answers, Capture, destroys, own_key
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE
from tests.support.identities import cluster_labels
from tests.test_architecture import ROOT

ROLE = ROOT / "infra" / "role.yaml"
KEY = f"projects/{PROJECT}/locations/{REGION}/keyRings/r/cryptoKeys/k"

# Requests of Google's provider 9.35 on a real engine that built and removed all kinds of stacks; it
# reads back each created resource.
_MADE = (
    *("global/firewalls", "global/networks", f"regions/{REGION}/resourcePolicies"),
    *(f"regions/{REGION}/routers", f"regions/{REGION}/subnetworks", f"zones/{ZONE}/instances"),
)
_PROVIDER = (
    *(f"POST /compute/v1/projects/P/{each}" for each in _MADE),
    *(f"GET /compute/v1/projects/P/{each}/NAME" for each in _MADE),
    *(f"DELETE /compute/v1/projects/P/{each}/NAME" for each in _MADE),
    f"PATCH /compute/v1/projects/P/regions/{REGION}/routers/NAME",
    *(f"GET /compute/v1/projects/P/zones/{ZONE}{each}" for each in ("", "/disks/NAME")),
    *(f"GET /compute/v1/projects/P/{each}/operations/X" for each in ("global", f"zones/{ZONE}")),
    f"GET /compute/v1/projects/P/regions/{REGION}/operations/X",
    *("POST /dns/v1/projects/P/managedZones", "GET /dns/v1/projects/P/managedZones/NAME"),
    "POST /dns/v1/projects/P/managedZones/NAME/changes",
    *("POST /storage/v1/b", "GET /storage/v1/b/NAME", "PUT /storage/v1/b/NAME/iam"),
    f"POST /v1/{KEY}:setIamPolicy",
    f"POST /v1/projects/P/locations/{ZONE}/instances",
    f"GET /v1/projects/P/locations/{ZONE}/instances/NAME",
    *("POST /v1/projects/P/serviceAccounts", "GET /v1/projects/P/serviceAccounts/NAME"),
)
# Changed settings, or changes by hand, that it updates in place.
_IN_PLACE = (
    *(f"POST /compute/v1/projects/P/zones/{ZONE}/{kind}/NAME/setLabels" for kind in ("disks",)),
    *(
        f"POST /compute/v1/projects/P/zones/{ZONE}/instances/NAME/{method}"
        for method in ("setLabels", "setMetadata", "addAccessConfig", "deleteAccessConfig", "start")
    ),
    "PATCH /compute/v1/projects/P/global/firewalls/NAME",
    f"PATCH /compute/v1/projects/P/regions/{REGION}/subnetworks/NAME",
    *("PATCH /storage/v1/b/NAME", "PATCH /dns/v1/projects/P/managedZones/NAME"),
    f"PATCH /v1/projects/P/locations/{ZONE}/instances/NAME",
    # The reason of a machine's stop.
    f"GET /compute/v1/projects/P/zones/{ZONE}/operations",
)
_OTHERS = {
    # gcloud's tunnel to the head, and the operator's access to runs in the bucket.
    *("iap.tunnelInstances.accessViaIAP", "storage.objects.get"),
}
_VERBS = {"POST": "create", "DELETE": "delete", "PATCH": "update", "PUT": "update"}
# Additional permissions on other resources that a request needs.
_ALSO = {
    "compute.(firewalls|routers|subnetworks).(create|delete|update)": (
        "compute.networks.updatePolicy",
    ),
    "compute.instances.create": (
        *("compute.disks.create", "compute.disks.setLabels", "compute.instances.setLabels"),
        *("compute.instances.setMetadata", "compute.instances.setServiceAccount"),
        *("compute.resourcePolicies.use", "compute.subnetworks.use"),
        *("compute.subnetworks.useExternalIp", "iam.serviceAccounts.actAs"),
    ),
    "compute.instances.addAccessConfig": ("compute.subnetworks.useExternalIp",),
    "compute.routers.update": ("compute.subnetworks.use",),
    "dns.changes.create": (
        *("dns.resourceRecordSets.create", "dns.resourceRecordSets.delete"),
        "dns.resourceRecordSets.list",
    ),
    "dns.managedZones.create": ("dns.networks.bindPrivateDNSZone",),
    "file.instances.(create|delete|update)": ("file.operations.get",),
    "storage.buckets.setIamPolicy": ("storage.buckets.getIamPolicy",),
}
# The whole request, and its permissions; {verb} is from the method and whether one is named.
_TABLE = (
    (r"\w+ /compute/v1/projects/P/(?:aggregated|global|\w+/[\w-]+)/(\w+)(?:/[^/]+)?", None),
    (r"POST /compute/v1/projects/P/zones/[\w-]+/(\w+)/NAME/(\w+)", "compute.{0}.{1}"),
    (r"GET /compute/v1/projects/P/zones/[\w-]+/(\w+)/NAME/(\w+)", "compute.{0}.{1}"),
    (r"\w+ /compute/v1/projects/P/(global|region|zone)s?[/\w-]*/operations/.*", "operation"),
    (r"GET /compute/v1/projects/P", "compute.projects.get"),
    (r"GET /compute/v1/projects/P/(region|zone)s/[\w-]+", "compute.{0}s.get"),
    (r"POST /dns/v1/projects/P/managedZones/NAME/changes", "dns.changes.create"),
    (r"GET /dns/v1/projects/P/managedZones/NAME/rrsets", "dns.resourceRecordSets.list"),
    (r"DELETE /dns/v1/projects/P/managedZones/NAME/rrsets/.*", "dns.changes.create"),
    (r"\w+ /dns/v1/projects/P/managedZones(/NAME)?", "dns.managedZones.{verb}"),
    (r"PUT /storage/v1/b/NAME/iam", "storage.buckets.setIamPolicy"),
    (r"\w+ /storage/v1/b/NAME/o(/.*)?", "storage.objects.{verb}"),
    (r"\w+ /storage/v1/b(/NAME)?", "storage.buckets.{verb}"),
    (r"GET /v1/projects/P/locations/[\w-]+/operations/.*", "file.operations.get"),
    (r"\w+ /v1/projects/P/locations/[\w-]+/instances(/NAME)?", "file.instances.{verb}"),
    (r"\w+ /v1/projects/P/serviceAccounts(/NAME)?", "iam.serviceAccounts.{verb}"),
    (r"GET /v1/projects/P/services", "serviceusage.services.list"),
    (r"GET /v1/projects/P/locations/global/services/.*", "cloudquotas.quotas.get"),
    (r"GET /v2/projects/P/policies/.*", "orgpolicy.policy.get"),
    (r"GET /v3/projects/P", "resourcemanager.projects.get"),
    (r"GET /v1/projects/P/billingInfo", "resourcemanager.projects.get"),
    # Queries of the caller's own permissions and of public images need no permission.
    (r"GET /storage/v1/b/NAME/iam/testPermissions", ""),
    (r"GET /compute/v1/projects/(?!P/)[\w-]+/global/images/.*", ""),
    (r"GET /compute/v1/projects/P/zones/[\w-]+/operations", "compute.zoneOperations.list"),
    # Public, or on the key instead of the project.
    (r"GET /v1/services/[\w-]+/skus", ""),
    (r"\w+ /v1/.*/cryptoKeys/k(:\w+)?", ""),
)


def permissions_of(request: str) -> set[str]:
    """Return the permissions that one request needs. Raises LookupError for an unknown one."""
    method = request.partition(" ")[0]
    for pattern, permission in _TABLE[::-1]:
        found = re.fullmatch(pattern, request)
        if found is None:
            continue
        named = found[1] if "{verb}" in (permission or "") else "/NAME" in request
        verb = _VERBS.get(method, "get" if named else "list")
        if permission is None:
            last = request.rpartition("/")[2]
            verb = _VERBS.get(method, "list" if last == found[1] else "get")
            permission = f"compute.{found[1]}.{verb}"
        elif permission == "operation":
            permission = f"compute.{found[1]}Operations.get"
        own = permission.format(*found.groups(), verb=verb)
        also = {each for key, more in _ALSO.items() if re.fullmatch(key, own) for each in more}
        return ({own} if own else set()) | also
    raise LookupError(request)


def as_recorded(request: str) -> str:
    """Return the path without its query and the names of this project's resources."""
    bare = request.partition("?")[0].replace(f"projects/{PROJECT}", "projects/P")
    bare = re.sub(r"(?<=cryptoKeys/)k(?=:)", "k", bare)
    return re.sub(r"mine-[\w-]+((%40|@)[\w.-]*)?", "NAME", bare)


@pytest.mark.processes
def test_the_role_has_exactly_the_permissions_that_the_requests_need(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = yaml.safe_load(ROLE.read_text(encoding="utf-8"))["includedPermissions"]
    assert role == sorted(set(role))
    for request in everything_once(site, monkeypatch):
        site.cloud.requests.append(request)
    needed = set(_OTHERS)
    for request in map(as_recorded, site.cloud.requests):
        needed |= permissions_of(request)
    assert sorted(needed) == role


def everything_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run each command on a cluster with all features; return the provider's requests."""
    site.build()
    own_key(site)
    features = {"bucket": "create", "sharedStorage": "filestore", "egress": "none", "kmsKey": KEY}
    site.configure(cluster="mine", project=PROJECT, zones=[ZONE], **features)
    cloud, labels = site.cloud, cluster_labels("mine")
    cloud.services |= {"cloudkms", "cloudresourcemanager", "dns", "file"}
    cloud.add_filestore("mine-shared", labels=labels, network="mine-network")
    cloud.add_dns_zone("mine-googleapis", labels=labels)
    cloud.key_members[KEY] = []
    cloud.buckets[0]["labels"]["tileforge-kept"] = "true"
    cloud.objects["mine-results"] = [{"name": "runs/one", "generation": "1", "size": "1"}]
    cloud.regions[REGION] = {}
    # A family whose quota is only in Cloud Quotas.
    cloud.add("machineTypes", "c4-standard-8", place=ZONE, labels={}, guestCpus=8)
    site.pulumi.machines("mine-0")
    site.pulumi.on("up", out="done\n")
    main(["doctor"], site.env)
    main(["doctor", "--machine-type", "c4-standard-8"], site.env)
    assert main(["up", "--yes", "--without-collect"], site.env) == ExitCode.OK
    main(["preflight", "--inventory", "stack", "--quick"], site.env)
    data = ("--yes", "--delete-filestore", "mine-shared")
    main(["sweep", "--cluster", "mine", "--project", PROJECT, "--delete", *data], site.env)
    destroys(site)
    monkeypatch.setattr("sys.stdin", Answers("mine-results\n"))
    words = ["down", *data, "--without-collect", "--delete-bucket", "mine-results"]
    assert main(words, site.env) == ExitCode.OK
    return [*_PROVIDER, *_IN_PLACE]


def test_a_request_that_nobody_has_looked_up_is_seen() -> None:
    with pytest.raises(LookupError):
        permissions_of("POST /compute/v1/projects/P")
    made = permissions_of(f"POST /compute/v1/projects/P/zones/{ZONE}/instances")
    assert "iam.serviceAccounts.actAs" in made and "compute.instances.create" in made
    deleted = permissions_of("DELETE /compute/v1/projects/P/global/firewalls/NAME")
    assert deleted == {"compute.firewalls.delete", "compute.networks.updatePolicy"}


def test_the_docs_name_the_role_and_what_it_leaves_open() -> None:
    page = (ROOT / "docs" / "guides" / "roles.md").read_text(encoding="utf-8")
    assert "--file infra/role.yaml" in page and "`iam.serviceAccounts.actAs`" in page
