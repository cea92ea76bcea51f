"""The whole program under Pulumi's mocks: golden files of its resources for each kind of stack."""

from __future__ import annotations

import functools
import json
import tempfile
from copy import deepcopy
from pathlib import Path

import pulumi
import pytest
from cryptography.hazmat.primitives import serialization

from infra.gcp.labels import last_expiry, mark
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.clouds.gcp.machine_hand_additions import KEPT_VARIABLE, OWN_METADATA
from payload.stack.resource_labels import CLUSTER_LABEL, EXPIRES_LABEL
from tests.infra.stacks import (
    CASES,
    FILESTORE,
    HEAD_ADDRESS,
    KEY,
    NOW_UNIX,
    NUMBER,
    Plain,
    Recorded,
    deploy,
)
from tests.support.golden_files import assert_golden
from tests.support.identities import CLUSTER as OWN_IDENTITY


@functools.cache
def _deployed(case: str) -> Recorded:
    with tempfile.TemporaryDirectory() as folder:
        return deploy(CASES[case], folder=Path(folder))


def deployed(case: str) -> Recorded:
    """Return one of the stacks of `CASES`, run once."""
    return deepcopy(_deployed(case))


def without_texts(value: object) -> object:
    """Replace long texts, which have separate tests, by their names."""
    if isinstance(value, dict):
        return {
            key: f"({key})" if key in ("user-data", "replacementTrigger") else without_texts(inner)
            for key, inner in value.items()
        }
    return [without_texts(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", CASES)
def test_the_graph_word_for_word(case: str) -> None:
    stack = deployed(case)
    graph = {"resources": stack.resources, "outputs": stack.outputs, "log": stack.log}
    assert_golden(f"stack.{case}.json", json.dumps(without_texts(graph), indent=1) + "\n")


@pytest.mark.parametrize("case", CASES)
def test_the_inventory_is_in_the_contracts_schema(case: str) -> None:
    text = json.dumps(deployed(case).outputs["inventory"])
    inventory = ClusterInventory.from_json(text, where="output")
    settings = CASES[case]
    assert len(inventory.nodes) == settings.get("nodeCount", 3)
    assert inventory.source == "pulumi"
    assert [node.host_keys for node in inventory.nodes] == [()] * len(inventory.nodes)


def test_the_operator_reaches_a_private_head_through_googles_proxy() -> None:
    access = deployed("default").outputs["inventory"]["access"]
    assert access == {"kind": "iap", "project": "my-project"}


def test_with_direct_access_the_head_alone_has_an_address_on_the_internet() -> None:
    inventory = deployed("direct").outputs["inventory"]
    assert inventory["access"] == {"kind": "direct"}
    addresses = [node.get("external_address") for node in inventory["nodes"]]
    assert addresses == [HEAD_ADDRESS, None, None]


def test_with_os_login_the_user_is_the_operators_own_and_no_key_is_in_user_data() -> None:
    stack = deployed("oslogin")
    assert stack.outputs["inventory"]["ssh_user"] == "ada_example_com"
    (text,) = {instance["metadata"]["user-data"] for instance in stack.of_type("Instance")}
    assert KEY not in text and "AllowUsers ada_example_com" in text


def test_an_expiry_that_somebody_has_changed_to_no_time_is_passed_over() -> None:
    texts = ("", "soon", "-1", "\u0663", "9" * 5_000, "1e9")
    hostile: list[dict[str, str] | None] = [{EXPIRES_LABEL: text} for text in texts]
    assert (
        last_expiry([*hostile, {EXPIRES_LABEL: "1800000000"}, {}, None]) == "2027-01-15T08:00:00Z"
    )
    assert last_expiry(hostile) == "1970-01-01T00:00:00Z"


def test_the_cluster_expires_at_the_limit_of_its_machines() -> None:
    stack = deployed("default")
    assert stack.outputs["expires"] == "2027-01-15T20:00:00Z"
    labels = [instance["labels"][EXPIRES_LABEL] for instance in stack.of_type("Instance")]
    assert set(labels) == {str(NOW_UNIX + 12 * 3600)}


def test_the_program_labels_all_that_it_builds() -> None:
    labelled = []
    for resource in deployed("default").resources:
        inputs = resource["inputs"]
        if "labels" in inputs or CLUSTER_LABEL in inputs.get("description", ""):
            labelled.append(inputs)
            text = json.dumps(inputs.get("labels") or inputs["description"])
            assert OWN_IDENTITY in text, resource["name"]
    assert len(labelled) > 12


@pytest.mark.parametrize("case", CASES)
def test_what_has_no_labels_says_the_same_in_its_description(case: str) -> None:
    stack = deployed(case)
    labels = stack.of_type("Instance")[0]["labels"]
    for resource in stack.resources:
        inputs, kind = resource["inputs"], resource["type"].rpartition(":")[2]
        if "labels" in inputs:
            assert inputs["labels"][CLUSTER_LABEL] == "dev"
        # A NAT belongs to its router, a permission to its bucket or key, a record to its zone.
        elif resource["type"].startswith("gcp:") and kind not in (
            *("RouterNat", "BucketIAMMember", "CryptoKeyIAMMember", "RecordSet"),
        ):
            assert (inputs.get("name") or inputs["accountId"]).startswith("dev-")
            assert inputs["description"].endswith(mark(labels))
            # Otherwise each run would change the expiry, and replace network and machines.
            assert "description" in resource["options"]["ignoreChanges"]


def test_a_bucket_outlives_the_cluster() -> None:
    stack = deployed("bucket")
    (bucket,) = [r for r in stack.resources if r["type"].endswith(":Bucket")]
    # Kept by its own option. Protection would make `pulumi destroy` fail for all resources.
    assert bucket["options"]["retainOnDelete"] and "protect" not in bucket["options"]
    assert bucket["inputs"]["forceDestroy"] is False
    (access,) = stack.of_type("BucketIAMMember")
    assert access["role"] == "roles/storage.objectUser"
    # The complete condition: objects of runs, and the bucket itself for listing names.
    assert access["condition"]["expression"] == (
        'resource.type != "storage.googleapis.com/Object" || '
        'resource.name.startsWith("projects/_/buckets/dev-results-1a2b3c4/objects/runs/")'
    )
    made = bucket["inputs"]
    assert made["softDeletePolicy"] == {"retentionDurationSeconds": 7 * 86_400}
    assert made["versioning"] == {"enabled": False}
    assert stack.outputs["inventory"]["bucket"] == access["bucket"] == "dev-results-1a2b3c4"


def test_an_existing_bucket_is_used_and_not_touched(tmp_path: Path) -> None:
    stack = deploy({"bucket": "my-results"}, folder=tmp_path)
    assert stack.of_type("Bucket") == []
    (access,) = stack.of_type("BucketIAMMember")
    assert access["bucket"] == "my-results"
    assert "/buckets/my-results/objects/runs/" in access["condition"]["expression"]
    assert stack.outputs["inventory"]["bucket"] == "my-results"


def test_googles_service_agents_may_use_the_key_before_anything_is_encrypted_with_it(
    tmp_path: Path,
) -> None:
    key = CASES["bucket"]["kmsKey"]
    stack = deployed("bucket")
    grants = [r for r in stack.resources if r["type"].endswith(":CryptoKeyIAMMember")]
    assert {grant["inputs"]["member"] for grant in grants} == {
        f"serviceAccount:service-{NUMBER}@{service}.iam.gserviceaccount.com"
        for service in ("compute-system", "gs-project-accounts")
    }
    for grant in grants:
        assert grant["inputs"]["role"] == "roles/cloudkms.cryptoKeyEncrypterDecrypter"
        assert grant["inputs"]["cryptoKeyId"] == key
        # Without it the kept bucket could not be read.
        assert grant["options"]["retainOnDelete"]
    names = {grant["name"] for grant in grants}
    for resource in stack.resources:
        if resource["type"].endswith((":Bucket", ":Instance")):
            assert names <= set(resource["options"]["dependsOn"])
    # Disks need only Compute Engine's agent, and a key's owner can grant it instead of the program.
    (only,) = deploy({"kmsKey": key}, folder=tmp_path).of_type("CryptoKeyIAMMember")
    assert "compute-system" in only["member"]
    shared = deploy(
        {"kmsKey": key, "sharedStorage": "filestore", "maxHourlyUsd": "none"}, folder=tmp_path
    )
    (instance,) = [each for each in shared.resources if each["type"] == FILESTORE]
    assert instance["inputs"]["kmsKeyName"] == key
    (of_filestore,) = [each for each in shared.resources if each["name"] == "dev-key-filestore"]
    assert of_filestore["inputs"]["member"] == (
        f"serviceAccount:service-{NUMBER}@cloud-filer.iam.gserviceaccount.com"
    )
    assert of_filestore["name"] in instance["options"]["dependsOn"]
    without = deploy({"kmsKey": key, "kmsGrant": False}, folder=tmp_path)
    assert without.of_type("CryptoKeyIAMMember") == []


def test_nodes_go_before_the_network_that_they_boot_through() -> None:
    for resource in deployed("default").resources:
        if resource["type"].endswith(":Instance"):
            needs = resource["options"]["dependsOn"]
            assert {"dev-nat", "dev-egress-web", "dev-placement", "dev-subnet"} <= set(needs)


def test_without_nat_googles_names_lead_to_its_restricted_addresses() -> None:
    stack = deployed("no-nat")
    (zone,) = stack.of_type("ManagedZone")
    assert (zone["dnsName"], zone["visibility"]) == ("googleapis.com.", "private")
    assert len(zone["privateVisibilityConfig"]["networks"]) == 1
    assert {record["name"]: record["rrdatas"] for record in stack.of_type("RecordSet")} == {
        "*.googleapis.com.": ["restricted.googleapis.com."],
        "restricted.googleapis.com.": [f"199.36.153.{last}" for last in range(4, 8)],
    }
    assert deployed("default").of_type("ManagedZone") == []


def triggers_of(stack: Recorded) -> set[str]:
    """Return the triggers of the nodes' replacement; all nodes have the same."""
    instances = [r for r in stack.resources if r["type"].endswith(":Instance")]
    return {instance["options"]["replacementTrigger"] for instance in instances}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "replaced"),
    [
        ({"nodeCount": 5}, False),
        ({"maxHourlyUsd": "20"}, False),
        ({"labels": ["owner=ada"]}, False),
        ({"flowLogs": False}, False),
        ({"machineType": "c3-highmem-22"}, True),
        ({"maxLifetime": "6h"}, True),
        ({"spot": "true"}, True),
        ({"wheelhouse": "/srv/wheels"}, True),
        ({"diskGb": 120}, True),
        ({"mtu": 1460}, True),
        ({"nodeCount": 1}, False),
        ({"accessMode": "direct", "operatorCidr": "198.51.100.7/32"}, False),
        ({"accessMode": "oslogin", "osLoginUser": "ada_example_com"}, True),
    ],
)
def test_nodes_are_replaced_only_for_what_cannot_change_in_place(
    tmp_path: Path, settings: Plain, replaced: bool
) -> None:
    (before,) = triggers_of(deployed("default"))
    (after,) = triggers_of(deploy(settings, folder=tmp_path))
    assert (before != after) is replaced


def test_another_operators_key_ends_no_machine(tmp_path: Path) -> None:
    before = deploy({}, folder=tmp_path).resources
    after = deploy({}, folder=tmp_path, public_key=KEY.replace("DQC5", "DQD5")).resources
    for old, new in zip(before, after, strict=True):
        assert old["options"] == new["options"]
    texts = {
        each["inputs"]["metadata"]["user-data"]
        for each in [*before, *after]
        if each["type"].endswith(":Instance")
    }
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("settings", "head_too"),
    [({"sharedStorage": "nfs"}, False), ({"monitoring": "prometheus"}, True)],
)
def test_another_number_of_nodes_ends_at_most_the_head_that_watches_them(
    tmp_path: Path, settings: Plain, head_too: bool
) -> None:
    def triggers(nodes: int) -> list[str]:
        made = deploy({**settings, "nodeCount": nodes}, folder=tmp_path).resources
        found = [each for each in made if each["type"].endswith("/instance:Instance")]
        return [each["options"]["replacementTrigger"] for each in found]

    head, *workers = triggers(3)
    head_then, *workers_then = triggers(4)
    assert (head != head_then) is head_too
    assert workers == workers_then[:2]


def test_from_several_nodes_to_one_the_head_stays_where_it_is_placed(tmp_path: Path) -> None:
    several = deploy({"nodeCount": 2}, folder=tmp_path).resources
    alone = deploy({"nodeCount": 1}, folder=tmp_path).resources

    def of(resources: list[Plain], name: str) -> Plain:
        (found,) = [each for each in resources if each["name"] == name]
        return found

    # Google cannot detach a policy from a machine, so it must stay in the program.
    assert of(several, "dev-placement") == of(alone, "dev-placement")
    old, new = (of(each, "dev-node-0") for each in (several, alone))
    assert old["options"]["replacementTrigger"] == new["options"]["replacementTrigger"]
    differing = differences(old["inputs"], new["inputs"])
    assert set(differing) == {"resourcePolicies", "scheduling.onHostMaintenance"}
    assert set(differing) <= set(new["options"]["ignoreChanges"])


def differences(old: object, new: object, path: str = "") -> list[str]:
    """Return the paths of inputs that differ, in the format of `ignoreChanges`."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            found
            for key in sorted({*old, *new})
            for found in differences(
                old.get(key),
                new.get(key),
                f'{path}["{key}"]' if "-" in key else f"{path}.{key}".lstrip("."),
            )
        ]
    return [] if old == new else [path]


@pytest.mark.parametrize("case", CASES)
def test_an_hour_later_nothing_changes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.infra.stacks.NOW_UNIX", NOW_UNIX + 3600)
    later = deploy(CASES[case], folder=tmp_path).resources
    for old, new in zip(deployed(case).resources, later, strict=True):
        for path in differences(old["inputs"], new["inputs"]):
            ignored = new["options"].get("ignoreChanges", [])
            assert any(path == each or path.startswith(f"{each}[") for each in ignored), path
        assert old["options"] == new["options"]


def test_a_filestore_instance_stays_in_its_zone(tmp_path: Path) -> None:
    settings = {"sharedStorage": "filestore", "maxHourlyUsd": "none"}
    elsewhere = {**settings, "zones": ["us-central1-b", "us-central1-a"]}
    old, new = (
        next(
            each for each in deploy(wanted, folder=tmp_path).resources if each["type"] == FILESTORE
        )
        for wanted in (settings, elsewhere)
    )
    differing = differences(old["inputs"], new["inputs"])
    assert differing == ["location"]
    assert "location" in new["options"]["ignoreChanges"]


def test_another_mtu_is_another_network_made_before_the_old_one_goes(tmp_path: Path) -> None:
    """A replaced resource that keeps its name is deleted first; otherwise it is created first.

    So resources that must be deleted before a network must refer to it and be replaced with it. The
    provider replaces firewall rules, routers and subnetworks with their network, a NAT with its
    router, and a machine with its subnetwork.
    """
    old, new = deployed("default").resources, deploy({"mtu": 1460}, folder=tmp_path).resources
    places = {"network", "router", "subnetwork"}
    for before, after in zip(old, new, strict=True):
        kind, options = after["type"].rpartition(":")[2], after["options"]
        changed = {
            path.rpartition(".")[2] for path in differences(before["inputs"], after["inputs"])
        }
        if kind in ("Network", "Subnetwork", "Router"):
            assert after["inputs"]["name"] == f"{before['inputs']['name']}-1460"
            assert "deleteBeforeReplace" not in options and "replaceOnChanges" not in options
        if kind == "Firewall":
            assert after["inputs"]["name"] == before["inputs"]["name"]
            assert options["deleteBeforeReplace"]
        if kind == "Instance":
            assert options["replacementTrigger"] != before["options"]["replacementTrigger"]
        names = {key for key in after["inputs"] if key in places} if kind != "Instance" else set()
        assert names <= changed, (after["name"], changed)


def test_what_people_add_to_a_machine_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEFORGE_METADATA_KEPT", 'startup-script,team_note,"] ]x')
    for each in deploy({}, folder=tmp_path).resources:
        if each["type"].endswith("/instance:Instance"):
            ignored = each["options"]["ignoreChanges"]
            assert {"attachedDisks", "tags", "bootDisk.initializeParams.size"} <= set(ignored)
            assert "bootDisk.initializeParams.labels" in ignored
            added = [path for path in ignored if path.startswith("metadata")]
            assert added[:3] == [
                *('metadata["ssh-keys"]', 'metadata["startup-script"]', 'metadata["team_note"]')
            ]
            # The program's own metadata is not "added by hand", so `up` reverts it.
            assert set(each["inputs"]["metadata"]) <= OWN_METADATA
    assert KEPT_VARIABLE == "TILEFORGE_METADATA_KEPT"


def test_a_hyperdisk_asks_for_the_speed_that_is_free() -> None:
    for case, iops in (("h3", 3_000), ("default", None)):
        for instance in deployed(case).of_type("Instance"):
            disk = instance["bootDisk"]["initializeParams"]
            assert disk.get("provisionedIops") == iops
            assert disk.get("provisionedThroughput") == (140 if iops else None)


@pytest.mark.parametrize("has_private", [False, True])
def test_the_program_makes_the_operators_key_and_a_preview_only_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_private: bool
) -> None:
    monkeypatch.setattr("infra.config.ClusterConfig.public_key_file", lambda _: public)
    private = tmp_path / ".cluster/new/id_ed25519"
    public: Path = private.with_name("id_ed25519.pub")
    settings = {"operatorPublicKeyFile": ""}
    stack = deploy(settings, folder=tmp_path, preview=True)
    assert (
        not private.parent.exists()
        and f"would create the cluster's SSH key: {private}" in stack.log
    )
    if has_private:
        deploy(settings, folder=tmp_path)
        public.unlink()
    stack = deploy(settings, folder=tmp_path)
    assert f"created the cluster's SSH key: {private}" in stack.log
    assert private.stat().st_mode & 0o777 == 0o600
    assert private.parent.stat().st_mode & 0o777 == 0o700
    key = serialization.load_ssh_private_key(private.read_bytes(), password=None)
    line = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    assert public.read_text().startswith(line.decode())
    # Only the public half reaches Google and Pulumi's state.
    secret = private.read_text().splitlines()[2]
    everything = json.dumps([stack.resources, stack.outputs, stack.log])
    assert line.decode() in everything and secret not in everything
    again = deploy(settings, folder=tmp_path)
    assert again.resources == stack.resources


def test_a_later_run_leaves_the_machines_own_expiry_alone() -> None:
    for resource in deployed("default").resources:
        if resource["type"].endswith(":Instance"):
            assert f'labels["{EXPIRES_LABEL}"]' in resource["options"]["ignoreChanges"]


def test_what_is_too_dear_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(
        pulumi.RunError, match=r"maxHourlyUsd = 1, but 3 x c3-highmem-8 cost \$1\.64"
    ):
        deploy({"maxHourlyUsd": "1"}, folder=tmp_path)


def test_all_that_is_wrong_is_said_at_once_and_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(pulumi.RunError) as caught:
        deploy({"project": "", "nodeCount": 0, "egress": "none", "spott": "x"}, folder=tmp_path)
    message = str(caught.value)
    assert "4 problem(s)" in message
    for key in ("project", "nodeCount", "wheelhouse", "spott"):
        assert f"tileforge:{key}" in message
