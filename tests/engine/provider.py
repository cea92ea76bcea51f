"""The requests that Google's Pulumi provider sends for the cluster program's resources.

No engine: the program runs under Pulumi's mocks, and what it asked for goes to the stand-in over
HTTP, in the order of its dependencies. So the stand-in's rules see every stack variant also where
no engine is installed; with one, the tests marked `engine` send the real requests.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.infra.stacks import Recorded
from tests.orchestrate.cloud.standin import PROJECT

Document = dict[str, Any]
# The order that the dependencies allow; they are removed in the reverse one.
_ORDER = (
    *("serviceaccount/account:Account", "kms/cryptoKeyIAMMember:CryptoKeyIAMMember"),
    *("compute/network:Network", "compute/subnetwork:Subnetwork", "compute/router:Router"),
    *("compute/routerNat:RouterNat", "dns/managedZone:ManagedZone", "dns/recordSet:RecordSet"),
    *("compute/firewall:Firewall", "compute/resourcePolicy:ResourcePolicy"),
    *("compute/instance:Instance", "storage/bucket:Bucket"),
    "storage/bucketIAMMember:BucketIAMMember",
)
_KEPT = ("storage/bucket:Bucket", "kms/cryptoKeyIAMMember:CryptoKeyIAMMember")
_SAME = ("name", "description", "labels", "network", "direction", "priority")


class RefusedRequestError(Exception):
    """Google, or the stand-in for it, refused a request."""


@dataclass(slots=True, kw_only=True)
class Provider:
    """Makes and removes a stack's resources at `url`."""

    url: str
    recorded: Recorded
    made: list[Document] = field(default_factory=list)

    def up(self) -> None:
        """Make everything. Raises RefusedRequestError with Google's words."""
        for resource in sorted(self._resources(), key=_place):
            for method, path, body in _creation(resource):
                self.request(method, path, body)
            self.made.append(resource)

    def down(self) -> None:
        """Remove everything but what outlives a destroy."""
        for resource in reversed(self.made):
            if _kind(resource) not in _KEPT:
                for method, path, body in _removal(resource):
                    self.request(method, path, body)
        self.made.clear()

    def _resources(self) -> list[Document]:
        """The program's, with names that Google gives in place of the mocks'."""
        text = json.dumps([each for each in self.recorded.resources if _kind(each) in _ORDER])
        for each in self.recorded.resources:
            path = _path(each)
            if path is not None:
                text = text.replace(f'"{each["inputs"]["name"]}-id"', json.dumps(path))
                text = text.replace(f'"https://example/{each["name"]}"', json.dumps(path))
        text = text.replace(f"@{PROJECT}.example", f"@{PROJECT}.iam.gserviceaccount.com")
        text = text.replace("@p.example", f"@{PROJECT}.iam.gserviceaccount.com")
        resources: list[Document] = json.loads(text)
        return resources

    def request(self, method: str, path: str, body: Document | None) -> Document:
        """Send a request, wait for its operation, and return the answer or the operation.

        Raises RefusedRequestError.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", method=method, data=data)
        try:
            with urllib.request.urlopen(request) as answer:
                operation: Document = json.load(answer)
        except urllib.error.HTTPError as error:
            said = json.load(error)["error"]["message"]
            raise RefusedRequestError(f"{method} {path}: {error.code}: {said}") from None
        while operation.get("kind") == "compute#operation" and operation["status"] != "DONE":
            scope = path.split("/")[5:7] if "/global/" not in path else ["global"]
            named = f"/compute/v1/projects/{PROJECT}/{'/'.join(scope)}/operations"
            operation = self.request("GET", f"{named}/{operation['name']}", None)
            time.sleep(0.005)
        if "error" in operation:
            raise RefusedRequestError(f"{method} {path}: {operation['error']['errors']}")
        return operation


def _kind(resource: Document) -> str:
    return str(resource["type"]).removeprefix("gcp:")


def _place(resource: Document) -> int:
    return _ORDER.index(_kind(resource))


def _path(resource: Document) -> str | None:
    """The resource's path in Compute Engine, without the version; None of another service."""
    kind, inputs = _kind(resource), resource["inputs"]
    if not kind.startswith("compute/") or kind == "compute/routerNat:RouterNat":
        return None
    collections = {"Subnetwork": "subnetworks", "Router": "routers"} | {
        "ResourcePolicy": "resourcePolicies",
        "Network": "networks",
        "Firewall": "firewalls",
        "Instance": "instances",
    }
    scope = "global"
    if "region" in inputs:
        scope = f"regions/{inputs['region']}"
    elif "zone" in inputs:
        scope = f"zones/{inputs['zone']}"
    collection = collections[kind.rpartition(":")[2]]
    return f"projects/{PROJECT}/{scope}/{collection}/{inputs['name']}"


Requests = list[tuple[str, str, Document | None]]


def _creation(resource: Document) -> Requests:
    """Return what makes it: method, path and body of each request."""
    kind, inputs = _kind(resource), resource["inputs"]
    path = _path(resource)
    if path is not None:
        body = {key: inputs[key] for key in _SAME if key in inputs}
        if kind in _BODIES:
            body |= _BODIES[kind](inputs)
        return [("POST", f"/compute/v1/{path.rpartition('/')[0]}", body)]
    match kind:
        case "serviceaccount/account:Account":
            account = {key: inputs[key] for key in ("displayName", "description")}
            body = {"accountId": inputs["accountId"], "serviceAccount": account}
            return [("POST", f"/v1/projects/{PROJECT}/serviceAccounts", body)]
        case "compute/routerNat:RouterNat":
            return [("PATCH", _router(inputs), {"nats": [_nat(inputs)]})]
        case "storage/bucket:Bucket":
            body = {"name": f"{resource['name']}-1a2b3c4", "labels": inputs["labels"]}
            body |= {"location": inputs["location"], "versioning": inputs["versioning"]}
            return [("POST", f"/storage/v1/b?project={PROJECT}", body)]
        case "storage/bucketIAMMember:BucketIAMMember":
            bindings = [{"role": inputs["role"], "members": [inputs["member"]]}]
            return [("PUT", f"/storage/v1/b/{inputs['bucket']}/iam", {"bindings": bindings})]
        case "dns/managedZone:ManagedZone":
            body = {key: inputs[key] for key in ("name", "dnsName", "labels", "description")}
            return [("POST", f"/dns/v1/projects/{PROJECT}/managedZones", body)]
        case "dns/recordSet:RecordSet":
            record = {"name": inputs["name"], "type": inputs["type"], "rrdatas": inputs["rrdatas"]}
            return [("POST", _changes(inputs), {"additions": [record]})]
    return []  # a grant on a key, which is not in the stand-in's hands


def _removal(resource: Document) -> Requests:
    kind, inputs = _kind(resource), resource["inputs"]
    path = _path(resource)
    if path is not None:
        return [("DELETE", f"/compute/v1/{path}", None)]
    match kind:
        case "serviceaccount/account:Account":
            email = f"{inputs['accountId']}@{PROJECT}.iam.gserviceaccount.com"
            return [("DELETE", f"/v1/projects/{PROJECT}/serviceAccounts/{email}", None)]
        case "compute/routerNat:RouterNat":
            return [("PATCH", _router(inputs), {"nats": []})]
        case "storage/bucketIAMMember:BucketIAMMember":
            return [("PUT", f"/storage/v1/b/{inputs['bucket']}/iam", {"bindings": []})]
        case "dns/managedZone:ManagedZone":
            zone = inputs["name"]
            return [("DELETE", f"/dns/v1/projects/{PROJECT}/managedZones/{zone}", None)]
        case "dns/recordSet:RecordSet":
            record = {"name": inputs["name"], "type": inputs["type"]}
            return [("POST", _changes(inputs), {"deletions": [record]})]
    return []


def _router(inputs: Document) -> str:
    region = f"/compute/v1/projects/{PROJECT}/regions/{inputs['region']}"
    return f"{region}/routers/{inputs['router']}"


def _changes(inputs: Document) -> str:
    return f"/dns/v1/projects/{PROJECT}/managedZones/{inputs['managedZone']}/changes"


def _nat(inputs: Document) -> Document:
    allocated = {
        "name": inputs["name"],
        "natIpAllocateOption": inputs["natIpAllocateOption"],
        "sourceSubnetworkIpRangesToNat": inputs["sourceSubnetworkIpRangesToNat"],
    }
    subnets = [
        {"name": each["name"], "sourceIpRangesToNat": each["sourceIpRangesToNats"]}
        for each in inputs["subnetworks"]
    ]
    return allocated | {"subnetworks": subnets, "logConfig": inputs["logConfig"]}


def _network(inputs: Document) -> Document:
    routing = {"routingMode": inputs["routingMode"]}
    return {"autoCreateSubnetworks": False, "routingConfig": routing, "mtu": inputs["mtu"]}


def _subnetwork(inputs: Document) -> Document:
    names = ("ipCidrRange", "privateIpGoogleAccess", "logConfig")
    return {key: inputs[key] for key in names if key in inputs}


def _firewall(inputs: Document) -> Document:
    names = ("sourceRanges", "destinationRanges", "sourceServiceAccounts", "targetServiceAccounts")
    body = {key: inputs[key] for key in names if key in inputs}
    for ours, theirs in (("allows", "allowed"), ("denies", "denied")):
        if ours in inputs:
            body[theirs] = [
                {("IPProtocol" if key == "protocol" else key): value for key, value in each.items()}
                for each in inputs[ours]
            ]
    return body


def _policy(inputs: Document) -> Document:
    return {"groupPlacementPolicy": inputs["groupPlacementPolicy"]}


def _instance(inputs: Document) -> Document:
    zone = f"projects/{PROJECT}/zones/{inputs['zone']}"
    boot, disk = inputs["bootDisk"], inputs["bootDisk"]["initializeParams"]
    params = {
        "sourceImage": disk["image"],
        "diskType": f"{zone}/diskTypes/{disk['type']}",
        "diskSizeGb": str(disk["size"]),
        "labels": disk["labels"],
    }
    if disk.get("provisionedIops"):
        params["provisionedIops"] = str(disk["provisionedIops"])
    interfaces = []
    for each in inputs["networkInterfaces"]:
        more = {key: value for key, value in each.items() if key not in ("accessConfigs",)}
        more["networkIP"] = more.pop("networkIp")
        configs = [{"type": "ONE_TO_ONE_NAT", **config} for config in each["accessConfigs"]]
        interfaces.append(more | {"accessConfigs": configs})
    body = {
        "machineType": f"{zone}/machineTypes/{inputs['machineType']}",
        "disks": [{"boot": True, "autoDelete": boot["autoDelete"], "initializeParams": params}],
        "networkInterfaces": interfaces,
        "scheduling": inputs["scheduling"],
        "metadata": {"items": [{"key": k, "value": v} for k, v in inputs["metadata"].items()]},
        "serviceAccounts": [inputs["serviceAccount"]],
        "shieldedInstanceConfig": inputs["shieldedInstanceConfig"],
    }
    if inputs.get("resourcePolicies"):
        body["resourcePolicies"] = [inputs["resourcePolicies"]]
    for name in (
        "networkPerformanceConfig",
        "advancedMachineFeatures",
        "confidentialInstanceConfig",
    ):
        if inputs.get(name):
            body[name] = inputs[name]
    return body


_BODIES: dict[str, Callable[[Document], Document]] = {
    "compute/network:Network": _network,
    "compute/subnetwork:Subnetwork": _subnetwork,
    "compute/firewall:Firewall": _firewall,
    "compute/resourcePolicy:ResourcePolicy": _policy,
    "compute/instance:Instance": _instance,
}
