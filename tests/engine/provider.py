"""The requests of Google's Pulumi provider for the cluster program's resources.

It converts a resource's inputs to Google's API, reads them back with GET, updates some of them in
place, and removes the resource. `Provider` creates the program's resources recorded under Pulumi's
mocks; tests.engine.fake_pulumi has the rest of an engine.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from tests.infra.stacks import Recorded
from tests.orchestrate.cloud.standin import PROJECT
from tests.support.waiting import DEADLINE_S

Document = dict[str, Any]
# The order of creation, by dependencies; removal is in reverse order.
_ORDER = (
    *("serviceaccount/account:Account", "kms/cryptoKeyIAMMember:CryptoKeyIAMMember"),
    *("compute/network:Network", "compute/subnetwork:Subnetwork", "compute/router:Router"),
    *("compute/routerNat:RouterNat", "dns/managedZone:ManagedZone", "dns/recordSet:RecordSet"),
    *("compute/firewall:Firewall", "compute/resourcePolicy:ResourcePolicy"),
    *("filestore/instance:Instance", "compute/instance:Instance", "storage/bucket:Bucket"),
    "storage/bucketIAMMember:BucketIAMMember",
)
_KEPT = ("storage/bucket:Bucket", "kms/cryptoKeyIAMMember:CryptoKeyIAMMember")
_TRY_AGAIN = (429, 500, 502, 503, 504)


class RefusedRequestError(Exception):
    """Google, or its stand-in, refused a request; `said` is the provider's output."""

    def __init__(self, message: str, *, status: int, said: str) -> None:
        super().__init__(message)
        self.status = status
        self.said = said


@dataclass(slots=True, kw_only=True)
class Sender:
    """Sends requests and waits for their operations."""

    url: str
    token: str = ""
    retries: int = 0
    """Number of retries while Google is busy or does not respond."""

    def request(self, method: str, path: str, body: Document | None) -> Document:
        """Send a request, wait for its operation, and return the response or the operation.

        Raises RefusedRequestError.
        """
        operation = self._retried(method, path, body)
        while operation.get("kind") == "compute#operation" and operation["status"] != "DONE":
            project = path.split("/")[4]
            scope = path.split("/")[5:7] if "/global/" not in path else ["global"]
            named = f"/compute/v1/projects/{project}/{'/'.join(scope)}/operations"
            operation = self._retried("GET", f"{named}/{operation['name']}", None)
            time.sleep(0.005)
        if operation.get("kind") == "compute#operation" and "error" in operation:
            errors = operation["error"]["errors"]
            said = "; ".join(each["message"] for each in errors)
            raise RefusedRequestError(f"{method} {path}: {errors}", status=0, said=said)
        return operation

    def find(self, path: str) -> Document | None:
        """Return the existing resource, or None. Raises RefusedRequestError."""
        try:
            return self.request("GET", path, None)
        except RefusedRequestError as error:
            if error.status == 404:
                return None
            raise

    def _retried(self, method: str, path: str, body: Document | None) -> Document:
        for attempt in range(self.retries + 1):
            try:
                return self._once(method, path, body)
            except RefusedRequestError as error:
                if error.status not in _TRY_AGAIN or attempt == self.retries:
                    raise
            except (OSError, http.client.HTTPException) as error:
                if not self.retries:
                    raise
                if attempt == self.retries:
                    text = f"dial tcp: {error}"
                    raise RefusedRequestError(text, status=0, said=text) from None
            time.sleep(0.01)
        raise AssertionError

    def _once(self, method: str, path: str, body: Document | None) -> Document:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(
            f"{self.url}{path}", method=method, data=data, headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                found: Document = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            said = json.load(error)["error"]
            reason = said["errors"][0]["reason"]
            raise RefusedRequestError(
                f"{method} {path}: {error.code}: {said['message']}",
                status=error.code,
                said=f"googleapi: Error {error.code}: {said['message']}, {reason}",
            ) from None


@dataclass(slots=True, kw_only=True)
class Provider:
    """Makes and removes a stack's resources at `url`."""

    url: str
    recorded: Recorded
    made: list[Document] = field(default_factory=list)

    def up(self) -> None:
        """Create all resources. Raises RefusedRequestError with Google's message."""
        for resource in sorted(self._resources(), key=lambda each: _ORDER.index(kind_of(each))):
            make(Sender(url=self.url), resource, PROJECT)
            self.made.append(resource)

    def down(self) -> None:
        """Remove all resources, except those that outlive a destroy."""
        for resource in reversed(self.made):
            if kind_of(resource) not in _KEPT:
                remove(Sender(url=self.url), resource, PROJECT)
        self.made.clear()

    def request(self, method: str, path: str, body: Document | None) -> Document:
        """Send a test's own request. Raises RefusedRequestError."""
        return Sender(url=self.url).request(method, path, body)

    def _resources(self) -> list[Document]:
        """Return the program's inputs, with Google's names instead of the mocks'."""
        wanted = [each for each in self.recorded.resources if kind_of(each) in _ORDER]
        text = json.dumps(wanted)
        for each in wanted:
            if kind_of(each) in _COMPUTE:
                path = id_of(each, PROJECT)
                text = text.replace(f'"{each["inputs"]["name"]}-id"', json.dumps(path))
                text = text.replace(f'"https://example/{each["name"]}"', json.dumps(path))
        text = text.replace(f"@{PROJECT}.example", f"@{PROJECT}.iam.gserviceaccount.com")
        text = text.replace("@p.example", f"@{PROJECT}.iam.gserviceaccount.com")
        resources: list[Document] = json.loads(text)
        for each in resources:
            if kind_of(each) == "storage/bucket:Bucket":
                each["inputs"]["name"] = f"{each['name']}-1a2b3c4"
        return resources


def set_defaults(resource: Document) -> None:
    """Add the provider's defaults for inputs that the program does not set."""
    if kind_of(resource) == "compute/firewall:Firewall":
        resource["inputs"].setdefault("priority", 1000)


def kind_of(resource: Document) -> str:
    """Return a resource's type without its package, such as compute/network:Network."""
    return str(resource["type"]).removeprefix("gcp:")


_COMPUTE = {
    "compute/network:Network": "networks",
    "compute/subnetwork:Subnetwork": "subnetworks",
    "compute/router:Router": "routers",
    "compute/firewall:Firewall": "firewalls",
    "compute/resourcePolicy:ResourcePolicy": "resourcePolicies",
    "compute/instance:Instance": "instances",
}
# Inputs that can be updated in place; a change of any other input replaces the resource.
_IN_PLACE = {
    "compute/network:Network": {"mtu", "routingMode"},
    "compute/subnetwork:Subnetwork": {"privateIpGoogleAccess", "logConfig"},
    "compute/router:Router": {"description"},
    "compute/routerNat:RouterNat": {"logConfig", "subnetworks", "natIpAllocateOption"},
    "compute/firewall:Firewall": {
        *("description", "priority", "disabled", "allows", "denies", "logConfig"),
        *("sourceRanges", "destinationRanges", "sourceServiceAccounts", "targetServiceAccounts"),
    },
    "compute/instance:Instance": {
        *("labels", "metadata", "tags", "attachedDisks", "bootDisk", "scheduling"),
        *("shieldedInstanceConfig", "serviceAccount", "desiredStatus", "deletionProtection"),
        *("allowStoppingForUpdate", "resourcePolicies"),
    },
    "serviceaccount/account:Account": {"description", "displayName"},
    "storage/bucket:Bucket": {
        *("labels", "versioning", "lifecycleRules", "forceDestroy", "softDeletePolicy"),
        *("uniformBucketLevelAccess", "publicAccessPrevention", "encryption"),
    },
    "dns/managedZone:ManagedZone": {"labels", "description"},
    "filestore/instance:Instance": {"labels", "description", "fileShares", "deletionProtection"},
}
NOUNS = {"compute/instance:Instance": "instance", "serviceaccount/account:Account": "account"}
"""The provider's resource names in errors, if they differ from the type's last part."""


_POLICIES = threading.Lock()
"""Serializes read-modify-write of policies, because Google refuses a write after another one."""


def changes_in_place(resource: Document, key: str, *, old: Document | None = None) -> bool:
    """Return whether the provider updates this input in place, if it was as in `old`.

    External addresses are added to and removed from a running machine.
    """
    if key == "networkInterfaces" and old is not None:
        return _without_addresses(resource) == _without_addresses(old)
    return key in _IN_PLACE.get(kind_of(resource), ())


def _without_addresses(instance: Document) -> list[Document]:
    return [{**each, "accessConfigs": []} for each in instance["inputs"]["networkInterfaces"]]


def id_of(resource: Document, project: str) -> str:
    """Return the resource's ID in Pulumi's state."""
    kind, inputs = kind_of(resource), resource["inputs"]
    if kind in _COMPUTE:
        scope = "global"
        if "zone" in inputs:
            scope = f"zones/{inputs['zone']}"
        elif "region" in inputs:
            scope = f"regions/{inputs['region']}"
        return f"projects/{project}/{scope}/{_COMPUTE[kind]}/{inputs['name']}"
    match kind:
        case "serviceaccount/account:Account":
            return f"projects/{project}/serviceAccounts/{email_of(resource, project)}"
        case "compute/routerNat:RouterNat":
            return f"{project}/{inputs['region']}/{inputs['router']}/{inputs['name']}"
        case "storage/bucket:Bucket":
            return str(inputs["name"])
        case "storage/bucketIAMMember:BucketIAMMember":
            return f"b/{inputs['bucket']}/{inputs['role']}/{inputs['member']}"
        case "kms/cryptoKeyIAMMember:CryptoKeyIAMMember":
            return f"{inputs['cryptoKeyId']}/{inputs['role']}/{inputs['member']}"
        case "dns/managedZone:ManagedZone":
            return f"projects/{project}/managedZones/{inputs['name']}"
        case "dns/recordSet:RecordSet":
            zone = f"projects/{project}/managedZones/{inputs['managedZone']}"
            return f"{zone}/rrsets/{inputs['name']}/{inputs['type']}"
        case "filestore/instance:Instance":
            place = inputs.get("location") or inputs["zone"]
            return f"projects/{project}/locations/{place}/instances/{inputs['name']}"
    raise AssertionError(f"the fake provider has no {kind}")


def email_of(resource: Document, project: str) -> str:
    """Return a service account's e-mail address."""
    return f"{resource['inputs']['accountId']}@{project}.iam.gserviceaccount.com"


def make(sender: Sender, resource: Document, project: str) -> None:
    """Create the resource. Raises RefusedRequestError."""
    kind, inputs = kind_of(resource), resource["inputs"]
    match kind:
        case "serviceaccount/account:Account":
            account = {key: inputs[key] for key in ("displayName", "description")}
            body = {"accountId": inputs["accountId"], "serviceAccount": account}
            sender.request("POST", f"/v1/projects/{project}/serviceAccounts", body)
        case "compute/routerNat:RouterNat":
            sender.request("PATCH", _router(inputs, project), {"nats": [_nat(inputs)]})
        case "storage/bucket:Bucket":
            body = {"name": inputs["name"], "location": inputs["location"], **_bucket(inputs)}
            sender.request("POST", f"/storage/v1/b?project={project}", body)
        case "storage/bucketIAMMember:BucketIAMMember":
            _bind(sender, inputs, add=True)
        case "kms/cryptoKeyIAMMember:CryptoKeyIAMMember":
            _grant(sender, inputs, add=True)
        case "dns/managedZone:ManagedZone":
            body = {key: inputs[key] for key in ("name", "dnsName", "labels", "description")}
            sender.request("POST", f"/dns/v1/projects/{project}/managedZones", body)
        case "dns/recordSet:RecordSet":
            record = {key: inputs[key] for key in ("name", "type", "rrdatas")}
            sender.request("POST", _changes(inputs, project), {"additions": [record]})
        case "filestore/instance:Instance":
            path = f"/v1/{id_of(resource, project)}"
            query = f"?instanceId={inputs['name']}"
            sender.request("POST", path.rpartition("/")[0] + query, _filestore(inputs))
        case _:
            path = f"/compute/v1/{id_of(resource, project)}"
            sender.request("POST", path.rpartition("/")[0], _body(kind, inputs, project))


def read(sender: Sender, resource: Document, project: str) -> Document | None:
    """Return Google's current resource, or None. Raises RefusedRequestError."""
    kind, inputs = kind_of(resource), resource["inputs"]
    match kind:
        case "compute/routerNat:RouterNat":
            router = sender.find(_router(inputs, project)) or {}
            nats = [each for each in router.get("nats", ()) if each["name"] == inputs["name"]]
            return nats[0] if nats else None
        case "storage/bucket:Bucket":
            return sender.find(f"/storage/v1/b/{inputs['name']}")
        case "storage/bucketIAMMember:BucketIAMMember":
            policy = sender.find(f"/storage/v1/b/{inputs['bucket']}/iam")
            return policy if _is_bound(policy, inputs) else None
        case "kms/cryptoKeyIAMMember:CryptoKeyIAMMember":
            policy = sender.find(f"/v1/{inputs['cryptoKeyId']}:getIamPolicy")
            return policy if _is_bound(policy, inputs) else None
        case "dns/managedZone:ManagedZone":
            return sender.find(f"/dns/v1/{id_of(resource, project)}")
        case "dns/recordSet:RecordSet":
            zone = f"/dns/v1/projects/{project}/managedZones/{inputs['managedZone']}"
            found = sender.find(f"{zone}/rrsets?name={inputs['name']}&type={inputs['type']}")
            return next(iter((found or {}).get("rrsets", ())), None)
        case "serviceaccount/account:Account" | "filestore/instance:Instance":
            return sender.find(f"/v1/{id_of(resource, project)}")
    return sender.find(f"/compute/v1/{id_of(resource, project)}")


def remove(sender: Sender, resource: Document, project: str) -> None:
    """Remove the resource. Raises RefusedRequestError."""
    kind, inputs = kind_of(resource), resource["inputs"]
    match kind:
        case "compute/routerNat:RouterNat":
            sender.request("PATCH", _router(inputs, project), {"nats": []})
        case "storage/bucketIAMMember:BucketIAMMember":
            _bind(sender, inputs, add=False)
        case "kms/cryptoKeyIAMMember:CryptoKeyIAMMember":
            _grant(sender, inputs, add=False)
        case "storage/bucket:Bucket":
            sender.request("DELETE", f"/storage/v1/b/{inputs['name']}", None)
        case "dns/recordSet:RecordSet":
            record = {"name": inputs["name"], "type": inputs["type"]}
            sender.request("POST", _changes(inputs, project), {"deletions": [record]})
        case "dns/managedZone:ManagedZone":
            sender.request("DELETE", f"/dns/v1/{id_of(resource, project)}", None)
        case "serviceaccount/account:Account":
            sender.request("DELETE", f"/v1/{id_of(resource, project)}", None)
        case "filestore/instance:Instance":
            path = f"/v1/{id_of(resource, project)}"
            operation = sender.request("DELETE", path, None)
            while not operation.get("done"):
                operation = sender.request("GET", f"/v1/{operation['name']}", None)
            if "error" in operation:
                said = operation["error"]["message"]
                raise RefusedRequestError(f"DELETE {path}: {said}", status=0, said=said)
        case _:
            sender.request("DELETE", f"/compute/v1/{id_of(resource, project)}", None)


def change(
    sender: Sender, resource: Document, keys: set[str], live: Document, project: str
) -> None:
    """Update the resource to these inputs. Raises RefusedRequestError."""
    kind, inputs = kind_of(resource), resource["inputs"]
    path = f"/compute/v1/{id_of(resource, project)}"
    match kind:
        case "compute/instance:Instance":
            _change_instance(sender, inputs, keys, live, project, path)
        case "compute/routerNat:RouterNat":
            sender.request("PATCH", _router(inputs, project), {"nats": [_nat(inputs)]})
        case "storage/bucket:Bucket":
            sender.request("PATCH", f"/storage/v1/b/{inputs['name']}", _bucket(inputs))
        case "dns/managedZone:ManagedZone":
            body = {key: inputs[key] for key in ("labels", "description")}
            sender.request("PATCH", f"/dns/v1/{id_of(resource, project)}", body)
        case "serviceaccount/account:Account":
            account = {key: inputs[key] for key in ("displayName", "description")}
            sender.request("PATCH", f"/v1/{id_of(resource, project)}", {"serviceAccount": account})
        case "filestore/instance:Instance":
            sender.request("PATCH", f"/v1/{id_of(resource, project)}", _filestore(inputs))
        case _:
            body = _body(kind, inputs, project)
            wanted = {_THEIRS.get(key, key) for key in keys}
            # Remove bindings that the program no longer has.
            sender.request("PATCH", path, {key: body.get(key) for key in sorted(wanted)})


_STOPPED = (
    "Changing the machine_type, min_cpu_platform, service_account, enable_display, "
    "shielded_instance_config, scheduling.node_affinities, scheduling.max_run_duration or "
    "network_interface.[#d].(network/subnetwork/subnetwork_project) or "
    "advanced_machine_features on a started instance requires stopping it. To acknowledge this, "
    "please set allow_stopping_for_update = true in your config. You can also stop it by setting "
    'desired_status = "TERMINATED", but the instance will not be restarted after the update.'
)


def _change_instance(
    sender: Sender, inputs: Document, keys: set[str], live: Document, project: str, path: str
) -> None:
    body = _instance(inputs, project)
    if keys & {"shieldedInstanceConfig", "serviceAccount"} and live["status"] == "RUNNING":
        raise RefusedRequestError(_STOPPED, status=0, said=_STOPPED)
    if "desiredStatus" in keys and inputs.get("desiredStatus", live["status"]) != live["status"]:
        verb = "start" if inputs["desiredStatus"] == "RUNNING" else "stop"
        sender.request("POST", f"{path}/{verb}", {})
    if "labels" in keys:
        # Keep entries that people added.
        others = {k: v for k, v in live.get("labels", {}).items() if k not in inputs["labels"]}
        labels = {**others, **inputs["labels"]}
        fingerprint = live.get("labelFingerprint", "")
        _set(sender, path, "setLabels", {"labels": labels, "labelFingerprint": fingerprint})
    if "bootDisk" in keys:
        disk = f"/compute/v1/projects/{project}/zones/{inputs['zone']}/disks/{inputs['name']}"
        there = sender.request("GET", disk, None)
        labels = inputs["bootDisk"]["initializeParams"].get("labels", {})
        fingerprint = there.get("labelFingerprint", "")
        _set(sender, disk, "setLabels", {"labels": labels, "labelFingerprint": fingerprint})
    if "metadata" in keys:
        _set(sender, path, "setMetadata", {**body["metadata"], "fingerprint": "AAAA"})
    if "tags" in keys:
        _set(sender, path, "setTags", {"items": inputs.get("tags", []), "fingerprint": "AAAA"})
    if "scheduling" in keys:
        _set(sender, path, "setScheduling", inputs["scheduling"])
    if "networkInterfaces" in keys:
        _change_addresses(sender, body["networkInterfaces"], live["networkInterfaces"], path)
    if "attachedDisks" in keys:
        for disk in live.get("disks", ()):
            if not disk.get("boot"):
                _set(sender, path, f"detachDisk?deviceName={disk['deviceName']}", {})


def _change_addresses(
    sender: Sender, interfaces: list[Document], live: list[Document], path: str
) -> None:
    for ours, theirs in zip(interfaces, live, strict=True):
        nic = f"networkInterface={theirs['name']}"
        for each in theirs.get("accessConfigs", ()):
            named = urlencode({"accessConfig": each["name"]})
            _set(sender, path, f"deleteAccessConfig?{named}&{nic}", {})
        for each in ours["accessConfigs"]:
            _set(sender, path, f"addAccessConfig?{nic}", each)


def _set(sender: Sender, path: str, verb: str, body: Document) -> None:
    sender.request("POST", f"{path}/{verb}", body)


def refreshed(resource: Document, live: Document) -> Document:
    """Return the inputs after a refresh, with Google's current values."""
    kind, inputs = kind_of(resource), dict(resource["inputs"])
    for key in inputs:
        value = live.get(key)
        if key in _SAME and key not in ("name", "network") and value is not None:
            inputs[key] = value
    if "labels" in inputs and "labels" in live:
        inputs["labels"] = {k: v for k, v in live["labels"].items() if k in inputs["labels"]}
    if kind == "compute/firewall:Firewall":
        for key in _RANGES:
            if live.get(key) or key in inputs:
                inputs[key] = live.get(key, [])
        for ours, theirs in (("allows", "allowed"), ("denies", "denied")):
            if theirs in live or ours in inputs:
                inputs[ours] = [_renamed(each, back=True) for each in live.get(theirs, ())]
        if live.get("disabled") or "disabled" in inputs:
            inputs["disabled"] = live.get("disabled", False)
    if kind == "compute/network:Network":
        inputs["mtu"] = live.get("mtu", inputs["mtu"])
    if kind == "compute/instance:Instance":
        inputs |= _refreshed_instance(inputs, live)
    return inputs


def _refreshed_instance(inputs: Document, live: Document) -> Document:
    items = live.get("metadata", {}).get("items", ())
    found: Document = {
        "metadata": {each["key"]: each["value"] for each in items},
        "machineType": live["machineType"].rpartition("/")[2],
    }
    if "shieldedInstanceConfig" in live:
        found["shieldedInstanceConfig"] = live["shieldedInstanceConfig"]
    if live.get("tags", {}).get("items") or "tags" in inputs:
        found["tags"] = live.get("tags", {}).get("items", [])
    disks = [each["source"] for each in live.get("disks", ()) if not each.get("boot")]
    if disks or "attachedDisks" in inputs:
        found["attachedDisks"] = [{"source": each} for each in disks]
    if "desiredStatus" in inputs:
        found["desiredStatus"] = live["status"]
    return found


def outputs_of(resource: Document, live: Document, project: str) -> Document:
    """Return the outputs of an existing resource."""
    kind, inputs = kind_of(resource), resource["inputs"]
    found = {**inputs, "selfLink": live.get("selfLink", ""), "project": project}
    if kind == "serviceaccount/account:Account":
        found["email"] = live["email"]
        found["name"] = live["name"]
    if kind == "filestore/instance:Instance":
        networks = zip(inputs["networks"], live["networks"], strict=True)
        found["networks"] = [
            {**ours, "ipAddresses": theirs["ipAddresses"]} for ours, theirs in networks
        ]
    if kind == "compute/instance:Instance":
        found |= {"instanceId": live["id"], "currentStatus": live["status"]}
        interfaces = []
        for ours, theirs in zip(
            inputs["networkInterfaces"], live["networkInterfaces"], strict=True
        ):
            addresses = [each.get("natIP") for each in theirs.get("accessConfigs", ())]
            configs = zip(ours.get("accessConfigs", ()), addresses, strict=False)
            each = [{**config, "natIp": address} for config, address in configs]
            interfaces.append({**ours, "accessConfigs": each})
        found["networkInterfaces"] = interfaces
    return found


def _is_bound(policy: Document | None, inputs: Document) -> bool:
    return any(
        each["role"] == inputs["role"] and inputs["member"] in each["members"]
        for each in (policy or {}).get("bindings", ())
    )


def _bind(sender: Sender, inputs: Document, *, add: bool) -> None:
    with _POLICIES:
        path = f"/storage/v1/b/{inputs['bucket']}/iam"
        policy = sender.request("GET", path, None)
        sender.request("PUT", path, {"bindings": _bindings(policy, inputs, add=add)})


def _grant(sender: Sender, inputs: Document, *, add: bool) -> None:
    with _POLICIES:
        path = f"/v1/{inputs['cryptoKeyId']}"
        policy = sender.request("GET", f"{path}:getIamPolicy", None)
        body = {"policy": {"bindings": _bindings(policy, inputs, add=add)}}
        sender.request("POST", f"{path}:setIamPolicy", body)


def _bindings(policy: Document, inputs: Document, *, add: bool) -> list[Document]:
    members: dict[str, list[str]] = {
        each["role"]: [m for m in each["members"] if m != inputs["member"]]
        for each in policy.get("bindings", ())
    }
    if add:
        members.setdefault(inputs["role"], []).append(inputs["member"])
    return [{"role": role, "members": each} for role, each in members.items() if each]


_RANGES = ("sourceRanges", "destinationRanges", "sourceServiceAccounts", "targetServiceAccounts")
_SAME = ("name", "description", "labels", "network", "direction", "priority")
_THEIRS = {"allows": "allowed", "denies": "denied", "routingMode": "routingConfig"}


def _router(inputs: Document, project: str) -> str:
    region = f"/compute/v1/projects/{project}/regions/{inputs['region']}"
    return f"{region}/routers/{inputs['router']}"


def _changes(inputs: Document, project: str) -> str:
    return f"/dns/v1/projects/{project}/managedZones/{inputs['managedZone']}/changes"


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


def _bucket(inputs: Document) -> Document:
    return {key: inputs[key] for key in ("labels", "versioning") if key in inputs}


def _filestore(inputs: Document) -> Document:
    shares = inputs["fileShares"]
    rest = {key: inputs[key] for key in ("labels", "description", "tier", "protocol", "networks")}
    return rest | {"fileShares": shares if isinstance(shares, list) else [shares]}


def _body(kind: str, inputs: Document, project: str) -> Document:
    body = {key: inputs[key] for key in _SAME if key in inputs}
    if kind == "compute/instance:Instance":
        return body | _instance(inputs, project)
    return body | (_BODIES[kind](inputs) if kind in _BODIES else {})


def _network(inputs: Document) -> Document:
    routing = {"routingMode": inputs["routingMode"]}
    return {"autoCreateSubnetworks": False, "routingConfig": routing, "mtu": inputs["mtu"]}


def _subnetwork(inputs: Document) -> Document:
    names = ("ipCidrRange", "privateIpGoogleAccess", "logConfig")
    return {key: inputs[key] for key in names if key in inputs}


def _firewall(inputs: Document) -> Document:
    body = {key: inputs[key] for key in (*_RANGES, "disabled", "logConfig") if key in inputs}
    for ours, theirs in (("allows", "allowed"), ("denies", "denied")):
        if ours in inputs:
            body[theirs] = [_renamed(each) for each in inputs[ours]]
    return body


def _renamed(traffic: Document, *, back: bool = False) -> Document:
    names = {"IPProtocol": "protocol"} if back else {"protocol": "IPProtocol"}
    return {names.get(key, key): value for key, value in traffic.items()}


def _policy(inputs: Document) -> Document:
    return {"groupPlacementPolicy": inputs["groupPlacementPolicy"]}


def _instance(inputs: Document, project: str) -> Document:
    zone = f"projects/{project}/zones/{inputs['zone']}"
    boot, disk = inputs["bootDisk"], inputs["bootDisk"]["initializeParams"]
    params = {
        "sourceImage": disk["image"],
        "diskType": f"{zone}/diskTypes/{disk['type']}",
        "diskSizeGb": str(disk["size"]),
        "labels": disk["labels"],
    }
    for name in ("provisionedIops", "provisionedThroughput"):
        if disk.get(name):
            params[name] = str(disk[name])
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
    if inputs.get("tags"):
        body["tags"] = {"items": inputs["tags"]}
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
}
