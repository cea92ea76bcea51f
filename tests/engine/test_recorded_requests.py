"""Requests of Google's real provider, replayed through the stand-in and read back with GET.

The responses are compared with Google's types: those of its client library for Compute Engine, and
the types in the discovery documents of other services.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from tests.engine.provider import Sender
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE, CloudStandIn
from tests.support.slow_imports import google_compute

RECORDED = Path(__file__).parents[1] / "fixtures/provider-9.35"
CASES = sorted(path.stem for path in RECORDED.glob("*.jsonl"))
_COMPUTE = {
    "disks": "Disk",
    "firewalls": "Firewall",
    "instances": "Instance",
    "networks": "Network",
    "resourcePolicies": "ResourcePolicy",
    "routers": "Router",
    "subnetworks": "Subnetwork",
}
_BETA_ALONE = {"deleteBgpAlwaysCompareMed"}
"""Fields that the provider sends but that version v1 of Compute Engine lacks."""
# https://cloud.google.com/storage/docs/json_api/v1/buckets, .../filestore/docs/reference/rest,
# .../dns/docs/reference/rest/v1, .../iam/docs/reference/rest/v1
_OTHERS = {
    "age": int,
    "capacityGb": str,
    "daysSinceNoncurrentTime": int,
    "enabled": bool,
    "id": str,
    "isLive": bool,
    "ttl": int,
    "uniqueId": str,
}
Document = dict[str, Any]


def recorded(case: str) -> list[Document]:
    """Return the recorded requests of a stack's `up` and `destroy`, with our client's paths."""
    lines = (RECORDED / f"{case}.jsonl").read_text(encoding="utf-8").splitlines()
    requests = [json.loads(line) for line in lines]
    for each in requests:
        each["path"] = f"/{each['path']}"
    return requests


def comparable(value: Any) -> Any:
    """Remove empty lists and objects, which a message does not distinguish from absent ones."""
    if isinstance(value, dict):
        inner = {key: comparable(each) for key, each in value.items() if key not in _BETA_ALONE}
        return {key: each for key, each in inner.items() if each not in ({}, [])}
    return [comparable(each) for each in value] if isinstance(value, list) else value


def check_types(path: str, answer: Document) -> None:
    """Assert that Google's types round-trip the response."""
    kind = _COMPUTE.get(path.split("/")[-2]) if path.startswith("/compute/") else None
    if kind is None:
        check_others(answer)
        return
    of_google = getattr(google_compute(), kind)
    message = of_google.pb(of_google())
    json_format.ParseDict(answer, message, ignore_unknown_fields=True)
    assert comparable(answer) == comparable(json_format.MessageToDict(message))


def check_others(value: Any) -> None:
    """Assert the types of the fields in `_OTHERS`, and that no field is null."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        assert inner is not None, key
        if key in _OTHERS:
            assert type(inner) is _OTHERS[key], (key, inner)
        if isinstance(inner, (dict, list)):
            check_others(inner)


def path_of(request: Document) -> str:
    """Return the path at which GET returns the created resource."""
    path = request["path"].partition("?")[0]
    if request["method"] in ("PATCH", "PUT"):
        return str(path)
    match = re.fullmatch(r"(.*/(?:instances|disks)/[^/]+)/setLabels", path)
    if match:
        return match[1]
    if path.endswith("/changes"):
        return f"{path.removesuffix('/changes')}/rrsets"
    if path.endswith(":setIamPolicy"):
        return f"{path.removesuffix('setIamPolicy')}getIamPolicy"
    body = request["body"]
    if path.endswith("/serviceAccounts"):
        return f"{path}/{body['accountId']}@{PROJECT}.iam.gserviceaccount.com"
    named = re.search("instanceId=([a-z0-9-]+)", request["path"])
    return f"{path}/{named[1] if named else body['name']}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_stored_has_googles_types(cloud: CloudStandIn, case: str) -> None:
    cloud.key_members[f"projects/{PROJECT}/locations/{REGION}/keyRings/r/cryptoKeys/k"] = []
    sender = Sender(url=cloud.url)
    for request in recorded(case):
        answer = sender.request(request["method"], request["path"], request["body"])
        if request["method"] != "DELETE":
            path = path_of(request)
            check_types(path, sender.request("GET", path, None))
        elif "/operations/" in answer.get("name", ""):
            assert sender.request("GET", f"/v1/{answer['name']}", None)["done"]
    left = {kind for (kind, _), items in cloud.items.items() if items}
    assert left == set() and not cloud.filestores


def test_a_disk_is_as_it_was_requested(cloud: CloudStandIn) -> None:
    sender = Sender(url=cloud.url)
    for request in recorded("c4"):
        if request["method"] == "DELETE":
            break
        sender.request(request["method"], request["path"], request["body"])
    path = f"/compute/v1/projects/{PROJECT}/zones/{ZONE}/disks/dev-node-0"
    labels = {"owner": "ada"}
    sender.request("POST", f"{path}/setLabels", {"labels": labels, "labelFingerprint": "AAAA"})
    disk = sender.request("GET", path, None)
    assert disk["zone"].endswith(f"/zones/{ZONE}")
    assert (disk["provisionedIops"], disk["provisionedThroughput"]) == ("3000", "140")
    assert disk["sizeGb"] == "100" and disk["labels"] == labels
    machine = sender.request("GET", path.replace("/disks/", "/instances/"), None)
    assert machine["scheduling"]["maxRunDuration"] == {"seconds": "43200"}
    assert machine["scheduling"]["nodeAffinities"] == []
