"""Google Cloud's REST APIs on a loopback port, for the requests of operator and provider.

Paths, field names and error documents follow the Compute Engine, Cloud Storage, Service Usage and
Organization Policy references. The state is in Python, and faults can be injected. With
`variables()` in its environment, Google's own Pulumi provider uses it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from tests.orchestrate.cloud.standin_compute import PROJECT as PROJECT
from tests.orchestrate.cloud.standin_compute import REGION as REGION
from tests.orchestrate.cloud.standin_compute import ZONE as ZONE
from tests.orchestrate.cloud.standin_compute import Compute, Document, MissingError
from tests.orchestrate.cloud.standin_json import as_google
from tests.orchestrate.cloud.standin_rules import RefusedError

NUMBER = "415104041262"
"""The project's number."""
TOKEN = "of-a-stand-in"
LISTED = (
    *("compute.restrictCloudNATUsage", "compute.trustedImageProjects"),
    *("compute.vmExternalIpAccess", "gcp.resourceLocations", "gcp.restrictNonCmekServices"),
    "gcp.restrictCmekCryptoKeyProjects",
)
"""Constraints of list policies."""
_LOST = 0
"""A status that closes the connection without a response."""


@dataclass(kw_only=True)
class Fault:
    """A response to the next `times` matching requests."""

    path: str
    """A pattern to find in the path."""
    status: int
    message: str = "the stand-in was told to fail"
    reason: str = "backendError"
    headers: Mapping[str, str] = field(default_factory=dict)
    times: int = 1
    method: str = "GET"
    after: bool = False
    """True to apply the request first, so that only its response is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request that got a response, and the endpoint that it used."""

    door: str
    method: str
    path: str
    body: Document
    status: int


class CloudStandIn(Compute):
    """The state and its HTTP server; a context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets: list[Document] = []
        self.bucket_policies: dict[str, Document] = {}
        """IAM bindings by bucket."""
        self.filestores: dict[str, Document] = {}
        """Instances by full name; a removal is done at the second poll of its operation."""
        self.filestore_places_down: list[str] = []
        self.filestore_refusal = ""
        """Error of a removal's operation; empty for success."""
        self.objects: dict[str, list[Document]] = {}
        """Name, generation and size of each object by bucket, including old versions."""
        self.services = {"compute", "iap", "iam", "storage"}
        self.empty_project = ""
        """Another, empty project."""
        self.has_billing = True
        self.images: dict[str, Document] | None = None
        """Fields of other projects' images by name; None if every image exists."""
        self.bucket_rights: list[str] | None = None
        """The operator's permissions on a bucket; None for all."""
        self.skus: list[Document] | None = None
        """Entries of the billing catalog; None if its API is disabled."""
        self.policies: dict[str, bool] = {}
        """Enforced organization policies, by constraint."""
        self.rules: dict[str, list[Document]] = {}
        """Rules of list policies, by constraint."""
        self.family_limits: list[Document] = []
        """Limits of the quota CPUS_PER_VM_FAMILY in Cloud Quotas."""
        self.key_members: dict[str, list[str]] = {}
        """Members that can encrypt and decrypt, by Cloud KMS key."""
        self.key: Document = {"purpose": "ENCRYPT_DECRYPT", "primary": {"state": "ENABLED"}}
        """Purpose and primary version, by Cloud KMS key."""
        self.key_grants = True
        """True if the operator can grant access to a key."""
        self.records: dict[str, list[tuple[str, str]]] = {}
        """Names and types of records, by DNS zone."""
        self.record_sets: dict[tuple[str, str, str], Document] = {}
        """Content of records created by requests, by zone, name and type."""
        self.tamper: Callable[[str, Document], bytes | None] = lambda target, document: None
        """Overrides the response to a path; returns None to keep it."""
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        """Method and path of every request."""
        self.before_each: Callable[[str, str], None] = lambda method, target: None
        """Called with method and path before each response, to change the state."""
        self.sent: list[Sent] = []
        """Every request that got a response."""
        self._servers: dict[str, tuple[ThreadingHTTPServer, threading.Thread]] = {}
        self.url = self.open_door("")
        """Return the value for TILEFORGE_API_ENDPOINT."""

    def open_door(self, name: str) -> str:
        """Return another URL of this cloud; `sent` records its name with each request."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, name))
        thread = threading.Thread(
            target=lambda: server.serve_forever(poll_interval=0.01), daemon=True
        )
        thread.start()
        self._servers[name] = (server, thread)
        return f"http://127.0.0.1:{server.server_address[1]}"

    def variables(self, url: str = "") -> dict[str, str]:
        """Return environment variables that direct Google's Pulumi provider to this server."""
        url = url or self.url
        return {
            "GOOGLE_COMPUTE_CUSTOM_ENDPOINT": f"{url}/compute/v1/",
            "GOOGLE_IAM_BETA_CUSTOM_ENDPOINT": f"{url}/v1/",
            "GOOGLE_IAM_CUSTOM_ENDPOINT": f"{url}/v1/",
            "GOOGLE_STORAGE_CUSTOM_ENDPOINT": f"{url}/storage/v1/",
            "GOOGLE_DNS_CUSTOM_ENDPOINT": f"{url}/dns/v1/",
            "GOOGLE_FILESTORE_CUSTOM_ENDPOINT": f"{url}/v1/",
            "GOOGLE_KMS_CUSTOM_ENDPOINT": f"{url}/v1/",
            "GOOGLE_RESOURCE_MANAGER_CUSTOM_ENDPOINT": f"{url}/v1/",
            "GOOGLE_CLOUD_BILLING_CUSTOM_ENDPOINT": f"{url}/v1/",
            "GOOGLE_OAUTH_ACCESS_TOKEN": TOKEN,
            "PULUMI_GCP_SKIP_REGION_VALIDATION": "true",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for server, thread in self._servers.values():
            server.shutdown()
            server.server_close()
            thread.join()

    def add_bucket(self, name: str, *, labels: dict[str, str], number: str = NUMBER) -> None:
        """Add a bucket; only the project with this `number` lists it."""
        self.buckets.append(
            {
                "kind": "storage#bucket",
                "id": name,
                "name": name,
                "labels": dict(labels),
                "projectNumber": number,
                "location": "US-CENTRAL1",
                "timeCreated": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.000Z}",
            }
        )

    def add_service_account(self, name: str, *, shown: str, description: str = "") -> None:
        """Add a service account; `shown` is its display name."""
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
        """Add a private zone with the cluster program's records."""
        self.add("managedZones", name, place="global", labels=labels, dnsName="googleapis.com.")
        self.records[name] = [
            ("googleapis.com.", "NS"),
            ("googleapis.com.", "SOA"),
            ("restricted.googleapis.com.", "A"),
            ("*.googleapis.com.", "CNAME"),
        ]

    def add_filestore(self, name: str, *, labels: dict[str, str], network: str) -> None:
        """Add a Filestore instance of 1 TiB."""
        place = f"projects/{PROJECT}/locations/{ZONE}"
        self.filestores[f"{place}/instances/{name}"] = {
            "name": f"{place}/instances/{name}",
            "labels": labels,
            "createTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.000Z}",
            "state": "READY",
            "fileShares": [{"name": "shared", "capacityGb": "1024"}],
            "networks": [{"network": f"projects/{PROJECT}/global/networks/{network}"}],
        }

    def count(self, pattern: str) -> int:
        """Return the number of requests whose method and path match."""
        return sum(bool(re.search(pattern, each)) for each in self.requests)

    def answer(
        self, method: str, target: str, body: Document, *, door: str = ""
    ) -> tuple[int, Document, Mapping[str, str]]:
        """Return status, document and headers for one request."""
        with self._lock:
            answer = self._answer(method, target, body)
            path = target.partition("?")[0]
            sent = Sent(door=door, method=method, path=path, body=body, status=answer[0])
            self.sent.append(sent)
            return answer

    def _answer(
        self, method: str, target: str, body: Document
    ) -> tuple[int, Document, Mapping[str, str]]:
        parts = urlsplit(target)
        query = {name: ",".join(values) for name, values in parse_qs(parts.query).items()}
        with self._lock:
            self.requests.append(f"{method} {target}")
            self.before_each(method, target)
            self.settle()
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, target):
                    fault.times -= 1
                    if fault.after:
                        with suppress(RefusedError):
                            self._route(method, parts.path, query, body)
                    return fault.status, _error(fault.status, fault), fault.headers
            try:
                return 200, self._route(method, parts.path, query, body), {}
            except RefusedError as error:
                fault = Fault(path="", status=error.status, message=str(error), reason=error.reason)
                return error.status, _error(error.status, fault), {}

    def _route(self, method: str, path: str, query: dict[str, str], body: Document) -> Document:
        words = path.strip("/").split("/")
        if self.empty_project and self.empty_project in (*words, query.get("project")):
            return {}
        match words:
            case ["storage", "v1", "b", *rest]:
                return self._storage(method, rest, query, body)
            case ["storage", "v1", "projects", _, "serviceAccount"]:
                email = f"service-{NUMBER}@gs-project-accounts.iam.gserviceaccount.com"
                return {"email_address": email, "kind": "storage#serviceAccount"}
            case ["v1", "services", _, "skus"]:
                if self.skus is None:
                    page_of_it = "https://console.developers.google.com/apis/api/cloudbilling."
                    said = "Cloud Billing API has not been used in project 1 before or it is "
                    said += f"disabled. Enable it by visiting {page_of_it}googleapis.com/overview"
                    raise RefusedError(403, said, "accessNotConfigured")
                page = self.page(self.skus, query)
                return {"skus": page.pop("items"), **page}
            case ["v1", "projects", _, "services"]:
                names = [{"config": {"name": f"{s}.googleapis.com"}} for s in sorted(self.services)]
                page = self.page(names, query)
                return {"services": page.pop("items"), **page}
            case ["v1" | "v1beta", "projects", _, "serviceAccounts", *rest]:
                return self._service_accounts(method, rest, query, body)
            case ["v2", "projects", _, "policies", name]:
                constraint = name.removesuffix(":getEffectivePolicy")
                if constraint in LISTED:
                    return {"spec": {"rules": self.rules.get(constraint, [{"allowAll": True}])}}
                return {"spec": {"rules": [{"enforce": self.policies.get(constraint, False)}]}}
            case ["v1", "projects", _, "locations", "global", "services", _, "quotaInfos", _]:
                return {"dimensionsInfos": self.family_limits}
            case ["v1", "projects", _, "locations", _, ("instances" | "operations"), *_]:
                return self._filestore(method, path.removeprefix("/v1/"), query, body)
            case ["v1", "projects", project]:
                return {"projectNumber": NUMBER, "projectId": project, "lifecycleState": "ACTIVE"}
            case ["v1", "projects", _, "billingInfo"]:
                return {"billingAccountName": "", "billingEnabled": self.has_billing}
            case ["v3", "projects", _]:
                return {"name": f"projects/{NUMBER}", "projectId": PROJECT}
            case ["v1", "projects", *_, "cryptoKeys", _]:
                return self._key(path.removeprefix("/v1/"), body)
            case ["dns", "v1", "projects", _, "managedZones", *rest]:
                return self._dns(method, rest, query, body)
            case ["compute", "v1" | "beta", "projects", project, "global", "images", name] if (
                project != PROJECT
            ):
                if self.images is not None and name not in self.images:
                    raise MissingError(f"The resource '{path[12:]}' was not found")
                features = {"guestOsFeatures": [{"type": "UEFI_COMPATIBLE"}]}
                image = {"name": name, "status": "READY", "diskSizeGb": "10", **features}
                return image | (self.images or {}).get(name, {})
            case ["compute", "v1" | "beta", "projects", _, *rest]:
                answer: Document = self.compute(method, rest, query, body)
                return answer
        raise MissingError(f"the stand-in has no path {path}")

    def _service_accounts(
        self, method: str, words: list[str], query: dict[str, str], body: Document
    ) -> Document:
        items = self.items.setdefault(("serviceAccounts", "global"), [])
        if not words and method == "POST":
            return self._make_account(body["accountId"], body.get("serviceAccount", {}))
        if not words:
            page = self.page(items, query)
            return {"accounts": page.pop("items"), **page}
        found = [item for item in items if item["email"] == unquote(words[0])]
        if not found:
            raise MissingError(f"Service account {words[0]} does not exist.")
        if method == "DELETE":
            items.remove(found[0])
            return {}
        if method == "PATCH":
            found[0].update(as_google(body.get("serviceAccount", {})))
        return found[0]

    def _make_account(self, account_id: str, more: Document) -> Document:
        email = f"{account_id}@{PROJECT}.iam.gserviceaccount.com"
        if self.has_account(email):
            words = f"Service account {account_id} already exists within project {PROJECT}."
            raise RefusedError(409, words, "alreadyExists")
        values = {"email": email, "uniqueId": "1", "projectId": PROJECT, **more}
        item = self.add("serviceAccounts", account_id, place="global", labels={}, **values)
        item["name"] = f"projects/{PROJECT}/serviceAccounts/{email}"
        return item

    def _storage(
        self, method: str, words: list[str], query: dict[str, str], body: Document
    ) -> Document:
        if not words and method == "POST":
            if any(bucket["name"] == body["name"] for bucket in self.buckets):
                raise RefusedError(409, "The requested bucket name is not available.")
            self.add_bucket(body["name"], labels={})
            self.buckets[-1].update(as_google(body))
            return self.buckets[-1]
        if not words:
            prefix = query.get("prefix", "")
            here = [each for each in self.buckets if each["projectNumber"] == NUMBER]
            found = [each for each in here if each["name"].startswith(prefix)]
            return self.page(found, query, size=query.get("maxResults"))
        found = [bucket for bucket in self.buckets if bucket["name"] == words[0]]
        if not found:
            raise MissingError("The specified bucket does not exist.")
        objects = self.objects.setdefault(words[0], [])
        match method, words[1:]:
            case "GET", []:
                return found[0]
            case (("PATCH" | "PUT"), []):
                found[0].update(as_google(body))
                return found[0]
            case "GET", ["iam", "testPermissions"]:
                asked = query["permissions"].split(",")
                may = asked if self.bucket_rights is None else self.bucket_rights
                return {"permissions": [each for each in asked if each in may]}
            case _, ["iam"]:
                policy: Document = self.bucket_policies.setdefault(words[0], {"bindings": []})
                if method == "PUT":
                    policy["bindings"] = body.get("bindings", [])
                policy |= {"etag": "CAE=", "version": 1}
                return policy
            case "DELETE", []:
                if objects:
                    raise RefusedError(409, "The bucket you tried to delete is not empty.")
                self.buckets.remove(found[0])
                return {}
            case "GET", ["o"]:
                live = objects if query.get("versions") == "true" else []
                return self.page(live, query, size=query.get("maxResults"))
            case "DELETE", ["o", name]:
                versions = (unquote(name), query["generation"])
                objects[:] = [o for o in objects if (o["name"], o["generation"]) != versions]
                return {}
        raise MissingError(f"the stand-in has no {method} of {words}")

    def _key(self, path: str, body: Document) -> Document:
        key, _, verb = path.partition(":")
        if key not in self.key_members:
            raise MissingError(f"CryptoKey {key} not found.")
        if not verb:
            primary: Document | None = self.key.get("primary")
            version = {"name": f"{key}/cryptoKeyVersions/1", **(primary or {})}
            return {"name": key} | self.key | ({"primary": version} if primary else {})
        if verb == "testIamPermissions":
            return {"permissions": ["cloudkms.cryptoKeys.setIamPolicy"]} if self.key_grants else {}
        role = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
        if verb == "setIamPolicy":
            bindings = body["policy"].get("bindings", ())
            self.key_members[key] = [
                member for each in bindings if each["role"] == role for member in each["members"]
            ]
        return {"version": 1, "bindings": [{"role": role, "members": self.key_members[key]}]}

    def _filestore(self, method: str, name: str, query: dict[str, str], body: Document) -> Document:
        if name.endswith("/locations/-/instances"):
            page = self.page(list(self.filestores.values()), query)
            down = {"unreachable": self.filestore_places_down}
            return {"instances": page.pop("items"), **down, **page}
        if method == "POST":
            full = f"{name}/{query['instanceId']}"
            if full in self.filestores:
                raise RefusedError(409, f"Resource '{full}' already exists", "alreadyExists")
            created = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.000Z}"
            made = as_google(body) | {"name": full, "createTime": created, "state": "READY"}
            for network in made.get("networks", ()):
                network["ipAddresses"] = ["10.60.1.2"]
            self.filestores[full] = made
            return {"name": name.replace("/instances", "/operations/make"), "done": True}
        if "/instances/" in name and method in ("GET", "PATCH"):
            if name not in self.filestores:
                raise MissingError(f"Resource '{name}' was not found")
            self.filestores[name] |= as_google(body)
            operation = {"name": name.replace("/instances/", "/operations/change-"), "done": True}
            return self.filestores[name] if method == "GET" else operation
        instance = name.replace("/operations/remove-", "/instances/")
        if method == "DELETE":
            if instance not in self.filestores:
                raise MissingError(f"Resource '{instance}' was not found")
            return {"name": instance.replace("/instances/", "/operations/remove-")}
        if self.filestore_refusal:
            error = {"error": {"code": 9, "message": self.filestore_refusal}}
            return {"name": name, "done": True, **error}
        self.filestores.pop(instance, None)
        return {"name": name, "done": True}

    def _dns(
        self, method: str, words: list[str], query: dict[str, str], body: Document
    ) -> Document:
        zones = self.items.setdefault(("managedZones", "global"), [])
        match words:
            case [zone] if method in ("GET", "PATCH"):
                found = [each for each in zones if each["name"] == zone]
                if not found:
                    raise MissingError(f"The 'parameters.managedZone' resource named {zone} is not")
                found[0].update(as_google(body))
                return found[0]
            case [] if method == "POST":
                self.records[body["name"]] = [("googleapis.com.", kind) for kind in ("NS", "SOA")]
                more: Document = {"place": "global", "labels": {}} | body
                more["id"] = str(len(self.records))
                return self.add("managedZones", **more)
            case [zone, "changes"]:
                for each in body.get("deletions", ()):
                    self.records[zone].remove((each["name"], each["type"]))
                for each in body.get("additions", ()):
                    self.records[zone].append((each["name"], each["type"]))
                    self.record_sets[zone, each["name"], each["type"]] = each
                return {"id": "1", "status": "done", **body}
            case [zone, "changes", number]:
                return {"id": number, "status": "done"}
            case []:
                page = self.page(zones, query)
                return {"managedZones": page.pop("items"), **page}
            case [zone, "rrsets"]:
                records = [
                    {"name": name, "type": kind} | self.record_sets.get((zone, name, kind), {})
                    for name, kind in self.records.get(zone, ())
                    if query.get("name", name) == name and query.get("type", kind) == kind
                ]
                page = self.page(records, query)
                return {"rrsets": page.pop("items"), **page}
            case [zone, "rrsets", name, kind] if method == "DELETE":
                self.records[zone].remove((unquote(name), kind))
                return {}
            case [zone] if method == "DELETE":
                assert all(kind in ("NS", "SOA") for _, kind in self.records[zone])
                self.drop("managedZones", zone)
                return {}
        raise MissingError(f"The 'parameters.managedZone' resource named {words} does not exist.")


def _error(status: int, fault: Fault) -> Document:
    entry = {"message": fault.message, "domain": "global", "reason": fault.reason}
    return {"error": {"code": status, "message": fault.message, "errors": [entry]}}


def _handler(cloud: CloudStandIn, door: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Otherwise delayed acknowledgements add 40 ms to each response on a kept-alive connection.
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def do_PUT(self) -> None:
            self._answer("PUT")

        def do_PATCH(self) -> None:
            self._answer("PATCH")

        def do_DELETE(self) -> None:
            self._answer("DELETE")

        def _answer(self, method: str) -> None:
            token = self.headers.get("Authorization", f"Bearer {TOKEN}")
            assert token == f"Bearer {TOKEN}", "a stand-in is sent no credentials"
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}"
            status, document, headers = cloud.answer(method, self.path, json.loads(sent), door=door)
            if status == _LOST:
                self.close_connection = True
                return
            raw = cloud.tamper(self.path, document)
            body = json.dumps(document).encode() if raw is None else raw
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing, because a failed test shows `requests`."""

    return Handler
