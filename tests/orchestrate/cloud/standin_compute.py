"""Compute Engine in the stand-in for Google Cloud: resources, changes and operations."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

from tests.orchestrate.cloud.standin_json import as_google
from tests.orchestrate.cloud.standin_rules import (
    USED_BY,
    WHILE_STOPPED,
    RefusedError,
    check_instance,
    check_name,
    family_of,
    references,
    vcpus_of,
)

PROJECT, REGION, ZONE = "acme-lab", "us-central1", "us-central1-a"
BASE = "https://www.googleapis.com/compute/v1/projects"
Document = dict[str, Any]

# Zonal and regional collections, which "aggregated" lists.
_SCOPED = {
    "instances": "zones",
    "disks": "zones",
    "addresses": "regions",
    "forwardingRules": "regions",
    "resourcePolicies": "regions",
    "routers": "regions",
    "subnetworks": "regions",
}
_SETS = {
    "setLabels": ("labels", "labelFingerprint"),
    "setMetadata": ("metadata", None),
    "setTags": ("tags", None),
    "setScheduling": ("scheduling", None),
    "setServiceAccount": ("serviceAccounts", None),
    "updateShieldedInstanceConfig": ("shieldedInstanceConfig", None),
    "setShieldedInstanceIntegrityPolicy": (None, None),
}


def _name_address(config: Document) -> Document:
    """Return the external address with Google's defaults."""
    config.setdefault("name", "External NAT")
    config.setdefault("natIP", "203.0.113.9")
    return config


class MissingError(RefusedError):
    """Response 404, with Google's text."""

    def __init__(self, message: str) -> None:
        super().__init__(404, message, "notFound")


class Compute:
    """The state of Compute Engine in one project."""

    def __init__(self) -> None:
        self.items: dict[tuple[str, str], list[Document]] = {}
        """Resources by collection and location: a zone, a region or `global`."""
        self.guest_attributes: dict[str, dict[str, str]] = {}
        """Host keys by type, by instance. An instance without an entry has not published keys."""
        self.host_key: str | None = None
        """The ssh-ed25519 key that a machine publishes at boot; None for no key."""
        self.regions: dict[str, dict[str, tuple[float, float]]] = {}
        """Limit and usage of each quota, by region."""
        self.project_quotas: dict[str, tuple[float, float]] = {}
        self.project_metadata: dict[str, str] = {}
        self.sells_everything = False
        """True if each zone offers every machine and disk type, not only added ones."""
        self.stocked_out: set[str] = set()
        """Zones without a free machine."""
        self.operation_s = 0.0
        """Time until an operation is done and takes effect."""
        self.unreachable: list[str] = []
        """Locations that aggregated lists report as unreachable."""
        self.failing: dict[str, str] = {}
        """Scopes, such as `zones/us-central1-f`, that have only a warning with this text in
        aggregated lists."""
        self.stuck: dict[str, str] = {}
        """Names whose removal fails, with the error."""
        self.page_size = 500
        self._operations: dict[str, Document] = {}
        self._pending: dict[str, tuple[float, Callable[[], None]]] = {}
        self._lock = threading.RLock()

    def quiet(self) -> AbstractContextManager[Any]:
        """Block requests while a test reads the state."""
        return self._lock

    def add(
        self, collection: str, name: str, *, place: str, labels: dict[str, str], **more: Any
    ) -> Document:
        """Add a resource; `place` is a zone, a region or `global`."""
        item: Document = {
            "id": str(abs(hash((collection, name, time.monotonic_ns()))) % 10**18),
            "name": name,
            "creationTimestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
            **({"labels": labels} if labels else {}),
            **as_google(more),
        }
        with self._lock:
            self.items.setdefault((collection, place), []).append(item)
        return item

    def add_node(
        self, name: str, *, labels: dict[str, str], zone: str = ZONE, **more: Any
    ) -> Document:
        """Add a running instance."""
        values = {"status": "RUNNING", "machineType": f"{BASE}/x/machineTypes/c3-highmem-8"}
        return self.add("instances", name, place=zone, labels=labels, **values | more)

    def drop(self, collection: str, name: str) -> None:
        """Remove a resource without a request."""
        with self._lock:
            for items in (v for (kind, _), v in self.items.items() if kind == collection):
                items[:] = [item for item in items if item["name"] != name]

    def settle(self) -> None:
        """Complete the operations that are due."""
        for name in [name for name, (ends, _) in self._pending.items() if ends <= time.monotonic()]:
            self._finish(name)

    def _finish(self, name: str) -> None:
        _, effect = self._pending.pop(name, (0.0, lambda: None))
        self._operations[name]["status"] = "DONE"
        effect()

    def compute(self, method: str, words: list[str], query: dict[str, str], body: Document) -> Any:
        """Return the response to a request below .../projects/PROJECT."""
        match words:
            case []:
                metadata = [{"key": k, "value": v} for k, v in self.project_metadata.items()]
                return {
                    "name": PROJECT,
                    "quotas": _quotas(self.project_quotas),
                    "commonInstanceMetadata": {"items": metadata},
                }
            case ["aggregated", collection]:
                return self._aggregated(collection, query)
            case ["regions", region] if region in self.regions:
                return {"name": region, "quotas": _quotas(self.regions[region])}
            case ["zones", zone]:
                region = f"{BASE}/{PROJECT}/regions/{zone.rpartition('-')[0]}"
                return {"name": zone, "region": region, "status": "UP"}
            case [*_, "operations", operation] if operation in self._operations:
                return self._operations[operation]
            case [*_, "operations", operation, "wait"] if operation in self._operations:
                self._finish(operation)
                return self._operations[operation]
            case ["zones", zone, "instances", name, "getGuestAttributes"]:
                return self._guest_attributes(zone, name, query)
            case ["global", collection] | ["zones" | "regions", _, collection]:
                place = "global" if words[0] == "global" else words[1]
                if method == "POST":
                    return self._insert(collection, place, body)
                return self.page(self.items.get((collection, place), []), query)
            case ["global", collection, name] | [_, _, collection, name]:
                place = "global" if words[0] == "global" else words[1]
                return self._one(method, collection, place, name, body)
            case ["zones", zone, "instances", name, "addAccessConfig" | "deleteAccessConfig"]:
                return self._change_address(self._find("instances", zone, name), zone, query, body)
            case ["zones", zone, "instances", name, verb] if method == "POST" or verb in _SETS:
                return self._act(self._find("instances", zone, name), zone, verb, body)
            case ["zones", zone, "disks", name, "setLabels"] if method == "POST":
                item = self._find("disks", zone, name)
                return self._set(item, "disks", zone, "setLabels", body)
        raise MissingError(f"The resource 'projects/{PROJECT}/{'/'.join(words)}' was not found")

    def _one(self, method: str, collection: str, place: str, name: str, body: Document) -> Document:
        if collection in ("machineTypes", "diskTypes") and self.sells_everything:
            link = f"{BASE}/{PROJECT}/zones/{place}/{collection}/{name}"
            return {"name": name, "selfLink": link, "guestCpus": vcpus_of(name)}
        item = self._find(collection, place, name)
        if method == "GET":
            return item
        if method == "DELETE":
            return self._delete(collection, place, item)
        self._check_references(collection, item | body)
        in_use = collection == "networks" and "mtu" in body and body["mtu"] != item.get("mtu")
        if in_use and any(self._users("networks", item)):
            raise RefusedError(400, "The MTU of a network changes only while no instance runs.")
        return self._begin("update", collection, place, item, lambda: _merge(item, body))

    def _insert(self, collection: str, place: str, body: Document) -> Document:
        check_name(body.get("name"))
        name = body["name"]
        if any(each["name"] == name for each in self.items.get((collection, place), ())):
            path = self._path(collection, place, name)
            raise RefusedError(409, f"The resource '{path}' already exists", "alreadyExists")
        self._check_references(collection, body)
        if collection == "instances":
            check_instance(body, zone=place, account=self.has_account)
            trouble = self._lacks(body, place)
            if trouble is not None:
                return self._begin("insert", collection, place, body, lambda: None, error=trouble)
        link = f"{BASE}/{self._path(collection, place, name).partition('/')[2]}"
        more = {key: value for key, value in body.items() if key != "name"} | {"selfLink": link}
        item = self.add(collection, name, place=place, **({"labels": {}} | more))
        if collection in ("instances", "subnetworks"):
            item.setdefault("fingerprint", "AAAA")
        if collection == "instances":
            self._boot(item, place)
        return self._begin("insert", collection, place, item, lambda: _running(item))

    def _boot(self, item: Document, zone: str) -> None:
        """Create the disks and addresses of a new machine."""
        item |= {"status": "PROVISIONING", "zone": f"{BASE}/{PROJECT}/zones/{zone}"}
        item |= {"labelFingerprint": "AAAA", "metadata": item.get("metadata", {})}
        item["metadata"].setdefault("fingerprint", "AAAA")
        item.setdefault("tags", {}).setdefault("fingerprint", "AAAA")
        for disk in item.get("disks", ()):
            params = disk.pop("initializeParams", {})
            name = params.get("diskName", item["name"])
            link = f"{BASE}/{self._path('disks', zone, name).partition('/')[2]}"
            made = {"type": params.get("diskType"), "sizeGb": params.get("diskSizeGb", "10")}
            made |= {"selfLink": link, "users": [item["selfLink"]], "status": "READY"}
            made |= {"sourceImage": params.get("sourceImage"), "zone": item["zone"]}
            made |= {key: params.get(key) for key in ("provisionedIops", "provisionedThroughput")}
            made["labelFingerprint"] = "AAAA"
            self.add("disks", name, place=zone, labels=params.get("labels", {}), **made)
            disk |= {"source": link, "deviceName": disk.get("deviceName", name)}
        for number, interface in enumerate(item.get("networkInterfaces", ())):
            interface |= {"name": f"nic{number}", "fingerprint": "AAAA"}
            interface.setdefault("networkIP", f"10.60.0.{200 + len(self.items['instances', zone])}")
            for config in interface.get("accessConfigs", ()):
                _name_address(config)
        if self.host_key is not None:
            self.guest_attributes[item["name"]] = {"ssh-ed25519": self.host_key}

    def _change_address(
        self, item: Document, zone: str, query: dict[str, str], body: Document
    ) -> Document:
        """Add `body` to an interface, or remove the external address that `query` names."""
        (interface,) = (
            each for each in item["networkInterfaces"] if each["name"] == query["networkInterface"]
        )
        there = interface.get("accessConfigs", [])
        named = query.get("accessConfig")
        if named is None and there:
            raise RefusedError(400, "At most one access config currently supported.", "invalid")
        if named is not None and named not in [each["name"] for each in there]:
            raise RefusedError(
                400, f"Invalid value for field 'accessConfig': '{named}'.", "invalid"
            )
        verb = "addAccessConfig" if named is None else "deleteAccessConfig"
        configs = [_name_address({**body})] if named is None else []
        change = {"accessConfigs": configs}
        return self._begin(verb, "instances", zone, item, lambda: interface.update(change))

    def _act(self, item: Document, zone: str, verb: str, body: Document) -> Document:
        """Run one of a machine's methods."""
        if verb in WHILE_STOPPED and item["status"] != "TERMINATED":
            raise RefusedError(400, f"The instance must be stopped for {verb}.", "resourceNotReady")
        if verb in ("start", "resume", "stop"):
            status = {"status": "TERMINATED" if verb == "stop" else "RUNNING"}
            if verb == "start":
                status["lastStartTimestamp"] = datetime.now(UTC).isoformat()
            trouble = _stock_out(zone) if verb != "stop" and zone in self.stocked_out else None
            effect = (lambda: None) if trouble else (lambda: _merge(item, status))
            return self._begin(verb, "instances", zone, item, effect, error=trouble)
        if verb not in _SETS:
            raise MissingError(f"the stand-in has no method {verb}")
        return self._set(item, "instances", zone, verb, body)

    def _set(
        self, item: Document, collection: str, zone: str, verb: str, body: Document
    ) -> Document:
        """Run a method that replaces one field."""
        field, fingerprint = _SETS[verb]
        if fingerprint is not None and body.get(fingerprint) != item.get(fingerprint):
            raise RefusedError(412, "Labels fingerprint either invalid or not the latest one.")
        value = body.get(field, body) if field is not None else {}
        change = {field: [body] if verb == "setServiceAccount" else value} if field else {}
        return self._begin(verb, collection, zone, item, lambda: _merge(item, change))

    def _lacks(self, body: Document, zone: str) -> tuple[int, str, str] | None:
        """Return the error of an operation for this machine: no quota, or no free machine."""
        region, kind = zone.rpartition("-")[0], body["machineType"]
        metric = f"{family_of(kind).upper()}_CPUS"
        limit, used = self.regions.get(region, {}).get(metric, (float("inf"), 0.0))
        used += sum(
            vcpus_of(each["machineType"])
            for (collection, place), items in self.items.items()
            if collection == "instances" and place.startswith(region)
            for each in items
        )
        if used + vcpus_of(kind) > limit:
            words = f"Quota '{metric}' exceeded.  Limit: {limit} in region {region}."
            return 403, "QUOTA_EXCEEDED", words
        return _stock_out(zone) if zone in self.stocked_out else None

    def has_account(self, email: str) -> bool:
        """Return whether the service account exists."""
        accounts = self.items.get(("serviceAccounts", "global"), ())
        return any(each["email"] == email for each in accounts)

    def _check_references(self, collection: str, body: Document) -> None:
        for kind, link in references(collection, body):
            where, name = _place_in(link), link.rpartition("/")[2]
            if not any(each["name"] == name for each in self.items.get((kind, where), ())):
                path = self._path(kind, where, name)
                raise RefusedError(404, f"The resource '{path}' was not found", "notFound")

    def _users(self, collection: str, item: Document) -> list[str]:
        """Return the paths of resources that use a resource."""
        return [
            self._path(kind, place, each["name"])
            for (kind, place), items in self.items.items()
            if kind in USED_BY.get(collection, ())
            for each in items
            for _, link in [
                *references(kind, each),
                *(("disks", disk.get("source", "")) for disk in each.get("disks", ())),
            ]
            if link.endswith(f"/{collection}/{item['name']}")
        ]

    def _find(self, collection: str, place: str, name: str) -> Document:
        for item in self.items.get((collection, place), []):
            if item["name"] == name:
                return item
        path = self._path(collection, place, name)
        raise MissingError(f"The resource '{path}' was not found")

    def _path(self, collection: str, place: str, name: str) -> str:
        scope = "global" if place == "global" else f"{_SCOPED.get(collection, 'zones')}/{place}"
        return f"projects/{PROJECT}/{scope}/{collection}/{name}"

    def _aggregated(self, collection: str, query: dict[str, str]) -> Document:
        scope = _SCOPED[collection]
        pairs = [
            (place, item)
            for (kind, place), items in sorted(self.items.items())
            if kind == collection
            for item in items
        ]
        page = self.page(pairs, query)
        # Empty locations are also listed, with a warning, as Google does.
        listed: Document = {f"{scope}/{ZONE}": {"warning": {"code": "NO_RESULTS_ON_PAGE"}}}
        for place, item in page.pop("items"):
            key = place if place == "global" else f"{scope}/{place}"
            listed[key] = {collection: [*listed.get(key, {}).get(collection, []), item]}
        for key in (each for each in self.failing if each.startswith(scope)):
            listed[key] = {"warning": {"code": "UNREACHABLE", "message": self.failing[key]}}
        return page | {"items": listed, "unreachables": self.unreachable}

    def page(self, items: list[Any], query: dict[str, str], *, size: str | None = None) -> Document:
        """Return one page of a list, as the query requests."""
        begin = int(query.get("pageToken", "0"))
        end = begin + min(self.page_size, int(size or self.page_size))
        more = {"nextPageToken": str(end)} if end < len(items) else {}
        return {"items": items[begin:end], **more}

    def _guest_attributes(self, zone: str, name: str, query: dict[str, str]) -> Document:
        self._find("instances", zone, name)
        path = query.get("queryPath", "")
        if path != "hostkeys/" or name not in self.guest_attributes:
            raise MissingError(f"The resource '{path}' of type 'Guest Attribute' was not found.")
        keys = self.guest_attributes[name].items()
        entries = [{"namespace": "hostkeys", "key": k, "value": v} for k, v in keys]
        return {"queryPath": path, "queryValue": {"items": entries}}

    def _delete(self, collection: str, place: str, item: Document) -> Document:
        code = "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE"
        if item["name"] in self.stuck:
            error = (400, code, self.stuck[item["name"]])
            return self._begin("delete", collection, place, item, lambda: None, error=error)
        for user in self._users(collection, item) if "selfLink" in item else ():
            path = self._path(collection, place, item["name"])
            words = f"The resource '{path}' is already being used by '{user}'"
            raise RefusedError(400, words, "resourceInUseByAnotherResource")

        def effect() -> None:
            self.items[collection, place].remove(item)
            for disk in item.get("disks", ()):
                if disk.get("autoDelete"):
                    self.drop("disks", disk["source"].rpartition("/")[2])

        return self._begin("delete", collection, place, item, effect)

    def _begin(
        self,
        kind: str,
        collection: str,
        place: str,
        item: Document,
        effect: Callable[[], None],
        *,
        error: tuple[int, str, str] | None = None,
    ) -> Document:
        """Start an operation that takes effect when it is done; return it."""
        name = f"operation-{len(self._operations)}"
        path = self._path(collection, place, item["name"])
        operation: Document = {"kind": "compute#operation", "id": str(len(self._operations) + 1)}
        operation |= {"name": name, "operationType": kind, "status": "RUNNING", "progress": 0}
        operation |= {"targetLink": f"{BASE}/{path.partition('/')[2]}", "targetId": "1"}
        if place != "global":
            scope = _SCOPED.get(collection, "zones")
            operation[scope[:-1]] = f"{BASE}/{PROJECT}/{scope}/{place}"
        if error is not None:
            status, code, message = error
            operation |= {"httpErrorStatusCode": status, "httpErrorMessage": "BAD REQUEST"}
            operation["error"] = {"errors": [{"code": code, "message": message}]}
        self._operations[name] = operation
        # If operations take no time, it takes effect immediately; its status is still polled.
        self._pending[name] = (time.monotonic() + self.operation_s, effect)
        begun = dict(operation)
        self.settle()
        return begun


def _stock_out(zone: str) -> tuple[int, str, str]:
    words = (
        f"The zone 'projects/{PROJECT}/zones/{zone}' does not have enough resources available "
        "to fulfill the request.  Try a different zone, or try again later."
    )
    return 503, "ZONE_RESOURCE_POOL_EXHAUSTED", words


def _running(item: Document) -> None:
    if "status" in item:
        item["status"] = "RUNNING"


def _merge(item: Document, change: Document) -> None:
    for key in [key for key, value in change.items() if value is None]:
        item.pop(key, None)
    for key, value in as_google(change).items():
        if key not in ("name", "fingerprint", "labelFingerprint"):
            item[key] = value


def _place_in(link: str) -> str:
    found = re.search("/(?:zones|regions)/([^/]+)/", f"/{link}")
    return found.group(1) if found else "global"


def _quotas(values: dict[str, tuple[float, float]]) -> list[Document]:
    return [{"metric": k, "limit": limit, "usage": used} for k, (limit, used) in values.items()]
