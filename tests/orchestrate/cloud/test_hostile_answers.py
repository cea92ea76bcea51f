"""Hostile or damaged responses of Google, outputs of Pulumi, and files, field by field.

Each is read or refused with a printable one-line error; no other exception, and no file is written.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import TileforgeError
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.clouds.cluster_records import load_cluster_record
from payload.orchestrate.clouds.gcp import host_keys
from payload.orchestrate.clouds.gcp.api_and_machine_type_checks import check_offers, check_services
from payload.orchestrate.clouds.gcp.billing_catalog import fresh_catalog
from payload.orchestrate.clouds.gcp.buckets import buckets
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.cluster_of_resource import by_cluster
from payload.orchestrate.clouds.gcp.compute_resource import get_compute_resource
from payload.orchestrate.clouds.gcp.dns_zones import dns_zones
from payload.orchestrate.clouds.gcp.encryption_key import check_key
from payload.orchestrate.clouds.gcp.filestore_instances import filestores
from payload.orchestrate.clouds.gcp.listing import _of_kind, list_everything
from payload.orchestrate.clouds.gcp.organization_policies import check_policies
from payload.orchestrate.clouds.gcp.prerequisites import check_billing, check_bucket, check_image
from payload.orchestrate.clouds.gcp.quotas import check_quotas
from payload.orchestrate.clouds.gcp.removal import remove
from payload.orchestrate.clouds.gcp.removal_order import Resource
from payload.orchestrate.clouds.gcp.resource_kinds import KINDS
from payload.orchestrate.clouds.gcp.service_accounts import service_accounts
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import Update
from payload.orchestrate.clouds.pulumi.failures import explain
from payload.orchestrate.clouds.pulumi.stack_config import cluster_name, settings
from payload.orchestrate.clouds.pulumi.stack_outputs import read_outputs, record_outputs
from payload.orchestrate.clouds.pulumi.stack_state import stack_state
from payload.stack.cloud_requirements import CloudRequirements, requirements_of
from tests.orchestrate.cloud.conftest import KEY, Site
from tests.orchestrate.cloud.standin import NUMBER, PROJECT, REGION, ZONE, Fault
from tests.orchestrate.cloud.test_doctor import family_limit
from tests.orchestrate.cloud.test_failures import failed
from tests.orchestrate.cloud.test_prices import sku
from tests.orchestrate.test_inventory_fuzz import HOSTILE
from tests.support.identities import cluster_labels

pytestmark = pytest.mark.processes

CRYPTO_KEY = f"projects/{PROJECT}/locations/{REGION}/keyRings/r/cryptoKeys/k"
LABELS = cluster_labels("mine")
NEED = CloudRequirements(
    machine_type="c4-standard-8",
    disk_type="hyperdisk-balanced",
    has_public_head=True,
    cluster="mine",
    kms_key=CRYPTO_KEY,
    makes_bucket=True,
)
WITH_BUCKET = CloudRequirements(bucket_name="b-1")
# Bodies that are not documents in Google's or Pulumi's format.
BODIES = (
    *(b"", b" ", b"null", b"0", b"[]", b"[[]]", b"{}", b"{", b'"x"', b"\xff", b"\x00", b"NaN"),
    *(b"<html><h1>502</h1></html>", b'{"a": 1}{"a": 2}', b'{"error": []}', b'{"error": "x"}'),
    *(b"[" * 20_000, b'{"a":' * 20_000, b"1" * 5_000, b"1e999", b'{"items": Infinity}'),
    *(b'{"error": {"message": 7, "errors": 7}}', b'{"error": {"errors": [7]}}', b'{"items": 7}'),
)


def pinned(site: Site) -> object:
    site.cloud.guest_attributes["mine-0"] = {"ssh-ed25519": KEY}
    inventory = known_inventory(site)
    cache = site.folder / "no-cache.json"
    options: dict[str, Any] = {"cache": cache, "say": str, "deadline_s": 0.0, "sleep": float}
    node = host_keys.pin_node(inventory.head, google(site), **options)
    # The result is still a valid node of an inventory, for the cache.
    ClusterInventory.from_json(replace(inventory, nodes=(node,)).to_json(), where="pinned")
    return node


def known_inventory(site: Site) -> ClusterInventory:
    known: ClusterInventory = _once(
        site, "known", lambda: read_outputs(Pulumi(site.env, folder=site.folder)).inventory
    )
    return known


def google(site: Site) -> Google:
    """Return this site's client with its connections, for thousands of requests."""
    client: Google = _once(site, "google", lambda: site.google(retry_s=0.0))
    return client


def _once(site: Site, name: str, make: Callable[[], Any]) -> Any:
    known = vars(site)
    key = f"_{name}"
    if key not in known:
        known[key] = make()
    return known[key]


def quotas(site: Site) -> list[object]:
    client = google(site)
    project = get_compute_resource(client, "Projects", "GetProjectRequest", what="project")
    return list(check_quotas(client, NEED, project))


def zone_gone(site: Site) -> list[str]:
    site.cloud.drop("managedZones", "mine-zone")
    site.cloud.add_dns_zone("mine-zone", labels=LABELS)
    return remove(google(site), [Resource(kind="DNS zone", name="mine-zone", location="global")])


def machine_gone(site: Site) -> list[str]:
    site.cloud.drop("disks", "extra")
    site.cloud.add("disks", "extra", place=ZONE, labels=LABELS)
    return remove(google(site), [Resource(kind="disk", name="extra", location=ZONE)])


def listed(*names: str) -> Callable[[Site], object]:
    """Return a reader of resources of these kinds that prints how to remove them."""

    def read(site: Site) -> object:
        kinds = [kind for kind in KINDS if kind.name in names]
        found = [each for kind in kinds for each in _of_kind(google(site), kind, [])]
        found += buckets(google(site)) if "bucket" in names else ()
        owned = by_cluster(found)
        return [each.removal(project=PROJECT) for group in owned.values() for each in group]

    return read


# Readers of responses, each with the pattern of the response's path.
READS: dict[str, tuple[str, Callable[[Site], object]]] = {
    "guest attributes": ("getGuestAttributes", pinned),
    "instance": ("instances/mine-0$|instances/mine-0[?]", pinned),
    "machines": ("aggregated/instances", listed("instance")),
    "policies": ("aggregated/resourcePolicies", listed("resource policy")),
    "networks": ("global/networks", listed("network")),
    "buckets": ("/storage/v1/b", listed("bucket")),
    "service accounts": ("/serviceAccounts", lambda site: list(service_accounts(google(site)))),
    "DNS zones": ("managedZones", lambda site: list(dns_zones(google(site)))),
    "Filestore instances": ("/locations/-/inst", lambda site: list(filestores(google(site)))),
    "DNS records": ("rrsets[?]", zone_gone),
    "operation": ("operations/|disks/extra", machine_gone),
    "APIs": ("/services[?]", lambda site: list(check_services(google(site), NEED))),
    "machine type": ("machineTypes/", lambda site: list(check_offers(google(site), NEED))),
    "org policies": (":getEffective", lambda site: list(check_policies(google(site), NEED))),
    "region": (f"regions/{REGION}", quotas),
    "project": ("projects/acme-lab$|projects/acme-lab[?]", quotas),
    "family quota": ("quotaInfos", quotas),
    "billing catalog": (
        "/skus",
        lambda site: fresh_catalog(google(site), folder=site.folder / "no-cache"),
    ),
    "billing": ("/billingInfo", lambda site: check_billing(google(site))),
    "image": ("/global/images/", lambda site: list(check_image(google(site), CloudRequirements()))),
    "bucket": ("/storage/v1/b/b-1", lambda site: list(check_bucket(google(site), WITH_BUCKET))),
    "project number": ("/v3/projects", lambda site: list(check_key(google(site), NEED))),
    "key": ("/cryptoKeys/k$", lambda site: list(check_key(google(site), NEED))),
    "key policy": (":getIamPolicy", lambda site: list(check_key(google(site), NEED))),
    "key permissions": (":testIam", lambda site: list(check_key(google(site), NEED))),
}


@pytest.fixture
def full(site: Site) -> Site:
    """Return a cloud with a resource of every kind that is read."""
    site.build(nodes=1)
    cloud = site.cloud
    cloud.add_dns_zone("mine-googleapis", labels=LABELS)
    cloud.add_filestore("mine-shared", labels=LABELS, network="mine-network")
    cloud.add("machineTypes", "c4-standard-8", place=ZONE, labels={}, guestCpus=8)
    cloud.add("diskTypes", "hyperdisk-balanced", place=ZONE, labels={})
    cloud.regions[REGION] = {"HDB_TOTAL_GB": (500.0, 1.0), "PREEMPTIBLE_CPUS": (0.0, 0.0)}
    cloud.project_quotas = {"NETWORKS": (5.0, 1.0)}
    cloud.family_limits = [family_limit("48", region=REGION, vm_family="C4")]
    cloud.rules["compute.vmExternalIpAccess"] = [{"values": {"allowedValues": ["under:folders/1"]}}]
    cloud.add_bucket("b-1", labels={})
    cloud.skus = [sku("C3 Instance Core running in Iowa", 33_982_000)]
    cloud.key_members[CRYPTO_KEY] = [f"serviceAccount:service-{NUMBER}@x.example"]
    return site


def is_sound(read: Callable[[], object]) -> bool:
    """Return True if it was read; otherwise assert that it was refused properly."""
    try:
        read()
    except TileforgeError as error:
        message = str(error)
        assert message.replace("\n", "").isprintable() and len(message) < 2_000, message
        return False
    return True


def places(document: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside."""
    is_list = isinstance(document, list)
    keys = range(len(document)) if is_list else list(document if isinstance(document, dict) else ())
    for key in keys:
        value = document[key]
        yield (key,)
        yield from ((key, *rest) for rest in places(value))


def answering(pattern: str, body: bytes) -> Callable[[str, dict[str, Any]], bytes | None]:
    """Return a fault that answers matching paths with these bytes."""
    return lambda target, _: body if re.search(pattern, target) else None


def with_value(document: Any, path: tuple[Any, ...], value: object) -> Any:
    """Return a copy with another value at the path."""
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("every", [16, pytest.param(2, marks=pytest.mark.seeds)])
@pytest.mark.parametrize("name", READS)
def test_every_field_of_googles_answers_may_be_hostile(
    full: Site, name: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("payload.orchestrate.clouds.gcp.compute_operations._OPERATION_S", 0.0)
    pattern, read = READS[name]
    seen: list[Any] = []

    def record(target: str, document: dict[str, Any]) -> None:
        if re.search(pattern, target):
            seen.append(document)

    full.cloud.tamper = record
    assert is_sound(lambda: read(full)) and seen
    for number, path in enumerate(places(seen[0])):
        for value in HOSTILE[number % every :: every]:
            body = json.dumps(with_value(seen[0], path, value)).encode()
            full.cloud.tamper = answering(pattern, body)
            is_sound(lambda: read(full))


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("status", "every"),
    [
        *((each, 12) for each in (200, 403, 500)),
        *(pytest.param(each, 1, marks=pytest.mark.seeds) for each in (200, 403, 404, 500)),
    ],
)
@pytest.mark.parametrize("name", READS)
def test_an_answer_of_google_that_is_no_document_is_refused(
    full: Site, name: str, status: int, every: int
) -> None:
    pattern, read = READS[name]
    for body in BODIES[list(READS).index(name) % every :: every]:
        full.cloud.faults = [
            Fault(path=pattern, status=status, times=10**6, method=method)
            for method in ("GET", "POST", "DELETE")
            if status != 200
        ]
        full.cloud.tamper = answering(pattern, body)
        is_sound(lambda: read(full))


def test_a_guest_attribute_of_blanks_alone_is_refused(full: Site) -> None:
    for value in (" ", "\n", "\t \r\n", "\u00a0", ""):
        full.cloud.guest_attributes["mine-0"] = {"ssh-ed25519": value}
        options: dict[str, Any] = {"say": str, "deadline_s": 0.0, "sleep": float}
        with pytest.raises(TileforgeError, match="published an invalid host key"):
            host_keys.pin_node(
                known_inventory(full).head, google(full), cache=full.folder / "none", **options
            )


def test_a_list_of_google_that_never_ends_is_given_up(
    full: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("payload.orchestrate.clouds.gcp.client.MOST_PAGES", 5)
    monkeypatch.setattr("payload.orchestrate.clouds.gcp.buckets.MOST_PAGES", 5)
    # Machines are listed first and alone, so an error there is raised immediately.
    full.cloud.tamper = lambda target, document: (
        None if "instances" in target else json.dumps(document | {"nextPageToken": "0"}).encode()
    )
    blind = "; ".join(list_everything(google(full)).blind)
    assert "listing networks: the list has more than 5 pages" in blind
    for kind in ("buckets", "service accounts", "DNS zones"):
        assert f"listing {kind}: the list has more than" in blind


class Saying(Pulumi):
    """Return a Pulumi that prints this text."""

    text = ""

    def ask(self, *words: str, timeout_s: float | None = None) -> str:
        return self.text


URN = "urn:pulumi:dev::tileforge::a$gcp:compute/instance:Instance::mine-0"


def exported() -> dict[str, Any]:
    urn = URN
    return {"version": 3, "deployment": {"resources": [{"urn": urn, "type": "x", "id": "7"}]}}


def outputs(site: Site) -> dict[str, Any]:
    known = known_inventory(site)
    return {
        "inventory": json.loads(known.to_json()),
        "hourly_usd": 1.5,
        "expires": "2026-11-22T08:00:00Z",
        "project": PROJECT,
        "region": REGION,
    }


def described(pulumi: Pulumi) -> object:
    return read_outputs(pulumi).price_and_end()


def needed(pulumi: Pulumi) -> object:
    known = settings(pulumi)
    need = requirements_of(known)
    name = cluster_name(pulumi, known)
    assert "/" not in name and name != ".."
    return need.describe(), need.services(), need.quotas(vcpus_per_node=8)


CONFIG = {
    "cluster": "mine",
    "project": PROJECT,
    "region": REGION,
    "machineType": "c3-highmem-8",
    "nodeCount": "3",
    "diskType": "auto",
    "diskGb": "100",
    "spot": "false",
    "image": "projects/ubuntu-os-cloud/global/images/x",
    "kmsKey": CRYPTO_KEY,
}


@pytest.mark.parametrize(
    ("what", "read"),
    [
        ("outputs", described),
        ("export", stack_state),
        ("config", needed),
    ],
)
def test_every_field_that_pulumi_prints_may_be_hostile(
    full: Site, what: str, read: Callable[[Pulumi], object]
) -> None:
    sound = {
        "outputs": outputs(full),
        "export": exported(),
        "config": {f"tileforge:{key}": {"value": value} for key, value in CONFIG.items()}
        | {"tileforge:zones": {"value": "[]", "objectValue": [ZONE]}},
    }[what]
    pulumi = Saying(full.env, folder=full.folder)
    pulumi.text = json.dumps(sound)
    assert is_sound(lambda: read(pulumi))
    for path in places(sound):
        for value in HOSTILE:
            pulumi.text = json.dumps(with_value(sound, path, value))
            is_sound(lambda: read(pulumi))
    for body in BODIES:
        pulumi.text = body.decode(errors="replace")
        is_sound(lambda: read(pulumi))


def instead(path: Path) -> Path:
    """Return the path after removing anything at it."""
    path.unlink()
    return path


DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "missing": lambda path, _: path.unlink(),
    "empty": lambda path, _: path.write_bytes(b""),
    "truncated": lambda path, sound: path.write_bytes(sound[: len(sound) // 2]),
    "a bit flip": lambda path, sound: path.write_bytes(
        sound[:20] + bytes([sound[20] ^ 4]) + sound[21:]
    ),
    "not UTF-8": lambda path, sound: path.write_bytes(sound.replace(b"m", b"\xff")),
    "huge": lambda path, _: os.truncate(path, 2**31),
    "a directory": lambda path, _: instead(path).mkdir(),
    "a pipe": lambda path, _: os.mkfifo(instead(path)),
    "a link to a device": lambda path, _: instead(path).symlink_to("/dev/zero"),
    "a link to itself": lambda path, _: instead(path).symlink_to(path),
    "of a later release": lambda path, sound: path.write_bytes(
        sound.replace(b'"schema_version": 1', b'"schema_version": 2')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_beside_the_cluster_is_passed_over(full: Site, damage: str) -> None:
    known = read_outputs(Pulumi(full.env, folder=full.folder))
    record_outputs(known, folder=full.folder, made_bucket="mine-results")
    cache, memory = full.folder / "host_keys.json", full.folder / ".cluster/mine/stack.json"
    options: dict[str, Any] = {"cache": cache, "say": str, "sleep": float}
    first = host_keys.pin_host_keys(known.inventory, google(full), **options)
    for path in (cache, memory):
        DAMAGES[damage](path, path.read_bytes())
    assert load_cluster_record(full.folder, "mine") is None or damage == "a bit flip"
    said: list[str] = []
    node = host_keys.pin_node(
        known.inventory.head, google(full), cache=cache, say=said.append, deadline_s=0.0
    )
    assert node == first.head


@pytest.mark.parametrize("file", ["host_keys.json", "stack.json"])
def test_every_field_of_a_file_beside_the_cluster_may_be_hostile(full: Site, file: str) -> None:
    known = read_outputs(Pulumi(full.env, folder=full.folder))
    record_outputs(known, folder=full.folder, made_bucket="mine-results")
    path = full.folder / ".cluster/mine" / file
    said: list[str] = []
    host_keys.pin_host_keys(
        known.inventory, google(full), cache=path.with_name("host_keys.json"), say=said.append
    )
    sound = json.loads(path.read_text())
    for place in places(sound):
        for value in HOSTILE:
            path.write_text(json.dumps(with_value(sound, place, value)))
            if file == "stack.json":
                found = load_cluster_record(full.folder, "mine")
                assert found is None or Google(found.project, endpoints=google(full)._endpoints)
            else:
                assert isinstance(host_keys._read_cache(path), dict)


@pytest.mark.parametrize(
    "text",
    [
        "error: Quota 'C3_CPUS' exceeded.  Limit: 1.2.3 in region us-central1",
        "error: Quota 'C3_CPUS' exceeded.  Limit: \u0663 in region us-central1",
        f"error: Quota 'C3_CPUS' exceeded.  Limit: {'9' * 5_000} globally",
        "x" * 1_000_000 + " googleapi: Error 403: \x1b]52;c;AAAA\x07 denied",
        "error: \x1b]0;title\x07 \u202e \x9b2J failed",
        "\x00" * 1_000 + "error: ",
    ],
)
def test_what_pulumi_says_of_a_failure_may_be_hostile(text: str) -> None:
    for update in (failed(text), Update(arguments=["up"], status=255, text=text)):
        message = str(explain(update))
        assert message.isprintable() and len(message) < 1_200_000


def test_a_family_quota_that_is_exceeded_is_named_with_its_family() -> None:
    text = (
        "error: Quota 'CPUS_PER_VM_FAMILY' exceeded.  Limit: 24.0 in region us-central1\n"
        "  dimensions = map[region:us-central1 vm_family:C4]"
    )
    assert "quota CPUS_PER_VM_FAMILY (C4) is 24 in us-central1" in str(explain(failed(text)))
