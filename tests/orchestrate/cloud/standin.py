"""Google Cloud's REST interfaces on a loopback port, as far as the operator's side uses them.

Paths, field names and error documents are those of the Compute Engine, Cloud Storage, Service
Usage and Organization Policy references; the state is Python, and faults can be put in.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

PROJECT, REGION, ZONE = "acme-lab", "us-central1", "us-central1-a"
NUMBER = "415104041262"
"""The project's."""
_BASE = "https://www.googleapis.com/compute/v1/projects"

# Collections that are in zones or regions, which "aggregated" lists.
_SCOPED = {
    "instances": "zones",
    "disks": "zones",
    "addresses": "regions",
    "forwardingRules": "regions",
    "resourcePolicies": "regions",
    "routers": "regions",
    "subnetworks": "regions",
}


@dataclass(kw_only=True)
class Fault:
    """What matching requests are answered with, the next `times` of them."""

    path: str
    """A pattern that is looked for in the path."""
    status: int
    message: str = "the stand-in was told to fail"
    reason: str = "backendError"
    headers: Mapping[str, str] = field(default_factory=dict)
    times: int = 1
    method: str = "GET"


class MissingError(Exception):
    """Answered with 404; the text is Google's."""


class RefusedError(Exception):
    """Answered with a status and Google's text."""

    def __init__(self, status: int, message: str, reason: str = "invalid") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class CloudStandIn:
    """The state, and the server over it; a context manager."""

    def __init__(self) -> None:
        self.items: dict[tuple[str, str], list[dict[str, Any]]] = {}
        """By collection and place: a zone, a region or `global`."""
        self.buckets: list[dict[str, Any]] = []
        self.objects: dict[str, list[dict[str, Any]]] = {}
        """By bucket: name, generation and size of each object, old versions included."""
        self.guest_attributes: dict[str, dict[str, str]] = {}
        """By instance: its host keys by type. An instance without an entry has written none."""
        self.regions: dict[str, dict[str, tuple[float, float]]] = {}
        """By region: limit and usage of each quota."""
        self.project_quotas: dict[str, tuple[float, float]] = {}
        self.project_metadata: dict[str, str] = {}
        self.services = {"compute", "iap", "iam", "storage"}
        self.policies: dict[str, bool] = {}
        """Organization policies that are enforced, by constraint."""
        self.rules: dict[str, list[dict[str, Any]]] = {}
        """Rules of organization policies that list values, by constraint."""
        self.family_limits: list[dict[str, Any]] = []
        """Limits of the quota CPUS_PER_VM_FAMILY, as Cloud Quotas has them."""
        self.key_members: dict[str, list[str]] = {}
        """By Cloud KMS key: who may encrypt and decrypt with it."""
        self.key_grants = True
        """Whether the operator may let others use a key."""
        self.records: dict[str, list[tuple[str, str]]] = {}
        """By DNS zone: names and types of its records."""
        self.tamper: Callable[[str, dict[str, Any]], bytes | None] = lambda target, document: None
        """What answers a path in place of this document; None leaves it as it is."""
        self.unreachable: list[str] = []
        """Places that a list of all names as missing from it."""
        self.failing: dict[str, str] = {}
        """Scopes, such as `zones/us-central1-f`, that have a warning with this text and nothing
        else in a list of all."""
        self.stuck: dict[str, str] = {}
        """Names whose removal fails, with the reason."""
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        """Method and path of everything that was asked."""
        self.page_size = 500
        self.before_each: Callable[[str, str], None] = lambda method, target: None
        """Called with method and path before a request is answered: time for the world to move."""
        self._operations: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(poll_interval=0.01), daemon=True
        )

    @property
    def url(self) -> str:
        """What TILEFORGE_API_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(
        self, collection: str, name: str, *, place: str, labels: dict[str, str], **more: Any
    ) -> dict[str, Any]:
        """Something new; `place` is a zone, a region or `global`."""
        item = {
            "id": str(abs(hash((collection, name, time.monotonic_ns()))) % 10**18),
            "name": name,
            "creationTimestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
            **({"labels": labels} if labels else {}),
            **more,
        }
        with self._lock:
            self.items.setdefault((collection, place), []).append(item)
        return item

    def add_node(
        self, name: str, *, labels: dict[str, str], zone: str = ZONE, **more: Any
    ) -> dict[str, Any]:
        """A running instance."""
        values = {"status": "RUNNING", "machineType": f"{_BASE}/x/machineTypes/c3-highmem-8"}
        return self.add("instances", name, place=zone, labels=labels, **values | more)

    def add_bucket(self, name: str, *, labels: dict[str, str]) -> None:
        """A bucket."""
        self.buckets.append(
            {
                "kind": "storage#bucket",
                "id": name,
                "name": name,
                "labels": dict(labels),
                "location": "US-CENTRAL1",
                "timeCreated": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.000Z}",
            }
        )

    def add_service_account(self, name: str, *, shown: str, description: str = "") -> None:
        """An account; `shown` is what the console calls it."""
        self.add(
            "serviceAccounts",
            name,
            place="global",
            labels={},
            email=f"{name}@{PROJECT}.iam.example",
            displayName=shown,
            description=description,
        )

    def add_dns_zone(self, name: str, *, labels: dict[str, str]) -> None:
        """A private zone with the records that the cluster program puts there."""
        self.add("managedZones", name, place="global", labels=labels, dnsName="googleapis.com.")
        self.records[name] = [
            ("googleapis.com.", "NS"),
            ("googleapis.com.", "SOA"),
            ("restricted.googleapis.com.", "A"),
            ("*.googleapis.com.", "CNAME"),
        ]

    def drop(self, collection: str, name: str) -> None:
        """Take something away behind everybody's back."""
        with self._lock:
            for items in (v for (kind, _), v in self.items.items() if kind == collection):
                items[:] = [item for item in items if item["name"] != name]

    def count(self, pattern: str) -> int:
        """How many requests there were whose method and path match."""
        return sum(bool(re.search(pattern, each)) for each in self.requests)

    def answer(self, method: str, target: str) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """Status, document and headers for one request."""
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        with self._lock:
            self.requests.append(f"{method} {target}")
            self.before_each(method, target)
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, target):
                    fault.times -= 1
                    return fault.status, _error(fault.status, fault), fault.headers
            try:
                return 200, self._route(method, parts.path, query), {}
            except MissingError as error:
                return 404, _error(404, Fault(path="", status=404, message=str(error))), {}
            except RefusedError as error:
                fault = Fault(path="", status=error.status, message=str(error), reason=error.reason)
                return error.status, _error(error.status, fault), {}

    def _route(self, method: str, path: str, query: dict[str, str]) -> dict[str, Any]:
        words = path.strip("/").split("/")
        match words:
            case ["storage", "v1", "b", *rest]:
                return self._storage(method, rest, query)
            case ["v1", "projects", _, "services"]:
                names = [{"config": {"name": f"{s}.googleapis.com"}} for s in sorted(self.services)]
                page = self._page(names, query)
                return {"services": page.pop("items"), **page}
            case ["v1", "projects", _, "serviceAccounts", *rest]:
                return self._service_accounts(method, rest, query)
            case ["v2", "projects", _, "policies", name]:
                constraint = name.removesuffix(":getEffectivePolicy")
                if constraint in ("compute.trustedImageProjects", "compute.vmExternalIpAccess"):
                    return {"spec": {"rules": self.rules.get(constraint, [{"allowAll": True}])}}
                return {"spec": {"rules": [{"enforce": self.policies.get(constraint, False)}]}}
            case ["v1", "projects", _, "locations", "global", "services", _, "quotaInfos", _]:
                return {"dimensionsInfos": self.family_limits}
            case ["v3", "projects", _]:
                return {"name": f"projects/{NUMBER}", "projectId": PROJECT}
            case ["v1", "projects", *_, "cryptoKeys", _]:
                return self._key(path.removeprefix("/v1/"))
            case ["dns", "v1", "projects", _, "managedZones", *rest]:
                return self._dns(method, rest, query)
            case ["compute", "v1", "projects", _, *rest]:
                return self._compute(method, rest, query)
        raise MissingError(f"the stand-in has no path {path}")

    def _compute(self, method: str, words: list[str], query: dict[str, str]) -> dict[str, Any]:
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
            case [*_, "operations", operation, "wait"] if operation in self._operations:
                return self._operations[operation] | {"status": "DONE"}
            case ["global", collection]:
                return self._page(self.items.get((collection, "global"), []), query)
            case ["zones", zone, "instances", name, "getGuestAttributes"]:
                return self._guest_attributes(zone, name, query)
            case ["global", collection, name] | [_, _, collection, name]:
                place = "global" if words[0] == "global" else words[1]
                item = self._find(collection, place, name)
                return self._delete(collection, place, item) if method == "DELETE" else item
        raise MissingError(f"The resource 'projects/{PROJECT}/{'/'.join(words)}' was not found")

    def _find(self, collection: str, place: str, name: str) -> dict[str, Any]:
        for item in self.items.get((collection, place), []):
            if item["name"] == name:
                return item
        where = "global" if place == "global" else f"zones/{place}"
        raise MissingError(
            f"The resource 'projects/{PROJECT}/{where}/{collection}/{name}' was not found"
        )

    def _service_accounts(
        self, method: str, words: list[str], query: dict[str, str]
    ) -> dict[str, Any]:
        items = self.items.setdefault(("serviceAccounts", "global"), [])
        if not words:
            page = self._page(items, query)
            return {"accounts": page.pop("items"), **page}
        found = [item for item in items if item["email"] == unquote(words[0])]
        if not found or method != "DELETE":
            raise MissingError(f"Service account {words[0]} does not exist.")
        items.remove(found[0])
        return {}

    def _storage(self, method: str, words: list[str], query: dict[str, str]) -> dict[str, Any]:
        if not words:
            return self._page(self.buckets, query, size=query.get("maxResults"))
        found = [bucket for bucket in self.buckets if bucket["name"] == words[0]]
        if not found:
            raise MissingError("The specified bucket does not exist.")
        objects = self.objects.setdefault(words[0], [])
        match method, words[1:]:
            case "GET", []:
                return found[0]
            case "DELETE", []:
                if objects:
                    raise RefusedError(409, "The bucket you tried to delete is not empty.")
                self.buckets.remove(found[0])
                return {}
            case "GET", ["o"]:
                live = objects if query.get("versions") == "true" else []
                return self._page(live, query, size=query.get("maxResults"))
            case "DELETE", ["o", name]:
                versions = (unquote(name), query["generation"])
                objects[:] = [o for o in objects if (o["name"], o["generation"]) != versions]
                return {}
        raise MissingError(f"the stand-in has no {method} of {words}")

    def _key(self, path: str) -> dict[str, Any]:
        key, _, verb = path.partition(":")
        if key not in self.key_members:
            raise MissingError(f"CryptoKey {key} not found.")
        if verb == "testIamPermissions":
            return {"permissions": ["cloudkms.cryptoKeys.setIamPolicy"]} if self.key_grants else {}
        role = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
        return {"version": 1, "bindings": [{"role": role, "members": self.key_members[key]}]}

    def _dns(self, method: str, words: list[str], query: dict[str, str]) -> dict[str, Any]:
        zones = self.items.setdefault(("managedZones", "global"), [])
        match words:
            case []:
                page = self._page(zones, query)
                return {"managedZones": page.pop("items"), **page}
            case [zone, "rrsets"]:
                records = [{"name": name, "type": kind} for name, kind in self.records[zone]]
                page = self._page(records, query)
                return {"rrsets": page.pop("items"), **page}
            case [zone, "rrsets", name, kind] if method == "DELETE":
                self.records[zone].remove((unquote(name), kind))
                return {}
            case [zone] if method == "DELETE":
                assert all(kind in ("NS", "SOA") for _, kind in self.records[zone])
                self.drop("managedZones", zone)
                return {}
        raise MissingError(f"The 'parameters.managedZone' resource named {words} does not exist.")

    def _aggregated(self, collection: str, query: dict[str, str]) -> dict[str, Any]:
        scope = _SCOPED[collection]
        pairs = [
            (place, item)
            for (kind, place), items in sorted(self.items.items())
            if kind == collection
            for item in items
        ]
        page = self._page(pairs, query)
        # Places with nothing are listed too, with a warning, as Google does.
        listed: dict[str, Any] = {f"{scope}/{ZONE}": {"warning": {"code": "NO_RESULTS_ON_PAGE"}}}
        for place, item in page.pop("items"):
            key = place if place == "global" else f"{scope}/{place}"
            listed[key] = {collection: [*listed.get(key, {}).get(collection, []), item]}
        for key in (each for each in self.failing if each.startswith(scope)):
            listed[key] = {"warning": {"code": "UNREACHABLE", "message": self.failing[key]}}
        return page | {"items": listed, "unreachables": self.unreachable}

    def _page(
        self, items: list[Any], query: dict[str, str], *, size: str | None = None
    ) -> dict[str, Any]:
        begin = int(query.get("pageToken", "0"))
        end = begin + min(self.page_size, int(size or self.page_size))
        more = {"nextPageToken": str(end)} if end < len(items) else {}
        return {"items": items[begin:end], **more}

    def _guest_attributes(self, zone: str, name: str, query: dict[str, str]) -> dict[str, Any]:
        self._find("instances", zone, name)
        path = query.get("queryPath", "")
        if path != "hostkeys/" or name not in self.guest_attributes:
            raise MissingError(f"The resource '{path}' of type 'Guest Attribute' was not found.")
        keys = self.guest_attributes[name].items()
        entries = [{"namespace": "hostkeys", "key": k, "value": v} for k, v in keys]
        return {"queryPath": path, "queryValue": {"items": entries}}

    def _delete(self, collection: str, place: str, item: dict[str, Any]) -> dict[str, Any]:
        name = f"operation-{len(self._operations)}"
        operation: dict[str, Any] = {"name": name, "status": "RUNNING", "targetId": "1"}
        if item["name"] in self.stuck:
            operation |= {
                "httpErrorStatusCode": 400,
                "httpErrorMessage": "BAD REQUEST",
                "error": {
                    "errors": [
                        {
                            "code": "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE",
                            "message": self.stuck[item["name"]],
                        }
                    ]
                },
            }
        else:
            self.items[collection, place].remove(item)
        self._operations[name] = operation
        return operation


def _quotas(values: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    return [{"metric": k, "limit": limit, "usage": used} for k, (limit, used) in values.items()]


def _error(status: int, fault: Fault) -> dict[str, Any]:
    entry = {"message": fault.message, "domain": "global", "reason": fault.reason}
    return {"error": {"code": status, "message": fault.message, "errors": [entry]}}


def _handler(cloud: CloudStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Else each answer on a kept connection waits 40 ms for a delayed acknowledgement.
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer("POST")

        def do_DELETE(self) -> None:
            self._answer("DELETE")

        def _answer(self, method: str) -> None:
            assert "Authorization" not in self.headers, "a stand-in is sent no credentials"
            status, document, headers = cloud.answer(method, self.path)
            raw = cloud.tamper(self.path, document)
            body = json.dumps(document).encode() if raw is None else raw
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a test that fails shows `requests`."""

    return Handler
