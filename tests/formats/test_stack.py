"""A stack's outputs, state and operator files, as written by 9e71e47."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from payload.stack.cluster_identity import IDENTITY_LABEL, ClusterIdentity
from tests.formats.commands import Commands, Done
from tests.formats.recorded import Recorded, read_json
from tests.orchestrate.cloud.fake_pulumi import FakePulumi
from tests.orchestrate.cloud.standin import CloudStandIn
from tests.orchestrate.cloud.test_failures import DETAILS
from tests.orchestrate.cloud.test_prices import CATALOG
from tests.orchestrate.sshd import make_key
from tests.support.formats import assert_format, assert_keys, keys_of
from tests.support.golden_files import GOLDEN
from tests.support.identities import CLUSTER

pytestmark = pytest.mark.processes

ELSEWHERE = {
    **{"inventory.nodes[].external_address": "str", "inventory.nodes[].gpu_capability": "str"},
    "inventory.nodes[].gpu_memory_gib": "float",
}
"""Types in a stack with a public address or GPUs; this one has neither."""


class Stack:
    """The recorded stack: `pulumi` prints its outputs and state, and Google lists its machines."""

    def __init__(self, recorded: Recorded, cloud: CloudStandIn, commands: Commands) -> None:
        self.recorded = recorded
        self.folder = recorded.cloud
        self.cloud = cloud
        self.pulumi = FakePulumi(recorded.root / "tools")
        self._commands = commands
        # The private half was not recorded, and without it no machine gets the public half.
        make_key(self.own("id_ed25519"))
        self.outputs = read_json(self.folder / "stack.outputs.json")
        self.known = read_json(self.folder / ".cluster" / "dev" / "host_keys.json")["inventory"]
        self.pulumi.outputs(**self.outputs)
        self.pulumi.on("stack", "export", out=(self.folder / "stack.export.json").read_text())
        settings = {"cluster": "dev", "project": self.outputs["project"]}
        self.configure(**settings, zones=["us-central1-f", "us-central1-a"])
        for node in self.known["nodes"]:
            cloud.add_node(node["name"], labels={}, id=node["instance_id"])

    def configure(self, **values: object) -> None:
        """Set the stack's config."""
        texts = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in values.items()
        }
        config = {f"tileforge:{key}": {"value": text} for key, text in texts.items()}
        self.pulumi.on("config", "--json", out=json.dumps(config))

    def run(self, *words: str) -> Done:
        """Run a command of the operator."""
        path = f"{self.pulumi.bin}{os.pathsep}{os.environ['PATH']}"
        env = {"PATH": path, "TILEFORGE_API_ENDPOINT": self.cloud.url}
        return self._commands.run(*words, folder=self.folder, env=env)

    def own(self, name: str) -> Path:
        """Return this machine's file about the cluster."""
        return self.folder / ".cluster" / "dev" / name


@pytest.fixture
def stack(recorded: Recorded, commands: Commands) -> Iterator[Stack]:
    """The recorded stack."""
    with CloudStandIn() as cloud:
        yield Stack(recorded, cloud, commands)


@pytest.fixture(params=[{}, {"a_later_key": {"of": [1]}}], ids=["recorded", "with unknown keys"])
def own_files(stack: Stack, request: pytest.FixtureRequest) -> Stack:
    """The recorded stack unchanged, then with an unknown key in each file of .cluster."""
    for path in (stack.folder / ".cluster").rglob("*.json"):
        path.write_text(json.dumps(read_json(path) | request.param), encoding="utf-8")
    return stack


def test_the_outputs_are_an_inventory_with_the_host_keys_that_were_pinned(own_files: Stack) -> None:
    done = own_files.run("plan", "--inventory", "stack", "--json", "--set", "model.preset=tiny")
    assert done.status == 0, done.err
    assert "$1.09" in done.err and "2027-01-15 20:00" in done.err
    # The machines publish no keys: these are the keys of .cluster/dev/host_keys.json.
    assert json.loads(done.out)["inventory"] == own_files.known


def test_the_state_names_machines_and_firewall_rules(stack: Stack) -> None:
    done = stack.run("doctor", "--json")
    checks = json.loads(done.out)["checks"]
    resources = read_json(stack.folder / "stack.export.json")["deployment"]["resources"]
    rules = [each["inputs"]["name"] for each in resources if each["type"].endswith(":Firewall")]
    assert len(rules) == 5
    # The stand-in for Google does not have these machines.
    missing = [each["name"] for each in checks if each["outcome"] == "error"]
    assert all(any(rule in name for name in missing) for rule in rules)


def test_the_catalog_of_prices_is_used_for_a_week(own_files: Stack) -> None:
    path = own_files.folder / ".cluster" / "prices.json"
    path.write_text(json.dumps(read_json(path) | {"read_unix": time.time() - 60}))
    done = own_files.run("doctor", "--json")
    (price,) = [each for each in json.loads(done.out)["checks"] if each["name"] == "price"]
    assert "$0.64 " in price["found"]


def test_a_zone_without_machines_is_passed_over_for_some_hours(own_files: Stack) -> None:
    path = own_files.own("zones.json")
    zones: Mapping[str, list[dict[str, object]]] = read_json(path)
    for each in zones["zones"]:
        each["time_unix"] = time.time() - 3600
    path.write_text(json.dumps(zones))
    own_files.pulumi.on("stack", "export", out="{}")
    own_files.pulumi.on("config", "set")
    own_files.pulumi.on("preview")
    own_files.pulumi.on("up", out="done")
    assert own_files.run("up", "--yes", "--next-zone").status == 0
    first = ["config", "set", "--path", "zones[0]", "us-central1-a"]
    assert first in [call[1:] for call in own_files.pulumi.calls()]


def test_a_cluster_that_is_remembered_is_swept_without_its_stack(own_files: Stack) -> None:
    own_files.pulumi.on("config", err="error: no stack selected", status=255)
    own_files.cloud.add("networks", "dev-network", place="global", labels={})
    project = read_json(own_files.own("stack.json"))["project"]
    done = own_files.run("sweep", "--project", project, "--json")
    found = json.loads(done.out)
    assert found["project"] == project
    assert [each["name"] for each in found["left"]["dev"] if each["kind"] == "network"] == [
        "dev-network"
    ]


def test_files_of_another_version_are_ignored_and_replaced(stack: Stack) -> None:
    other = {"schema_version": 2, "read_unix": time.time() - 60}
    for path in (stack.folder / ".cluster").rglob("*.json"):
        path.write_text(json.dumps(read_json(path) | other), encoding="utf-8")
    (key,) = read_json(stack.recorded.project / "rack.json")["nodes"][0]["host_keys"]
    kind, blob = key.split()
    for node in stack.known["nodes"]:
        stack.cloud.guest_attributes[node["name"]] = {kind: blob}
    done = stack.run("plan", "--inventory", "stack", "--json", "--set", "model.preset=tiny")
    nodes = json.loads(done.out)["inventory"]["nodes"]
    assert [node["host_keys"] for node in nodes] == [[key]] * 2  # the published keys
    assert read_json(stack.own("host_keys.json"))["schema_version"] == 1
    done = stack.run("doctor", "--json")
    (price,) = [each for each in json.loads(done.out)["checks"] if each["name"] == "price"]
    assert "$0.64 " not in price["found"]


def test_outputs_of_another_version_are_refused(stack: Stack) -> None:
    inventory = stack.outputs["inventory"] | {"schema_version": 2}
    stack.pulumi.outputs(**stack.outputs | {"inventory": inventory})
    done = stack.run("plan", "--inventory", "stack")
    assert done.status == 10 and re.search(r"schema_version\D+2\b", done.err)


def test_no_file_of_a_stack_changes_without_its_version(stack: Stack) -> None:
    stack.cloud.skus = CATALOG
    bucket = "urn:pulumi:dev::tileforge::gcp:storage/bucket:Bucket::dev-results"
    state = {"deployment": {"resources": [{"urn": bucket, "id": "dev-results-1a2b3c4"}]}}
    stack.pulumi.on("stack", "export", out=json.dumps(state))
    stack.pulumi.on("config", "set")
    stack.pulumi.on("up", out="done")
    stack.pulumi.on("up", out=DETAILS, status=255, times=1)
    stack.pulumi.replay("preview-new", status=0)
    for path in (stack.folder / ".cluster" / "prices.json", stack.own("zones.json")):
        path.unlink()  # whether they are too old depends on the day
    doctor = stack.run("doctor", "--json")
    up = stack.run("up", "--yes", "--next-zone")
    assert up.status == 0, up.err
    own = read_json(stack.own("identity.json"))["identity"]
    for name, identity in (("dev-node-9", {IDENTITY_LABEL: own}), ("dev-node-8", {})):
        limit = {"maxRunDuration": {"seconds": 3600}}
        labels = {"tileforge-cluster": "dev", **identity}
        stack.cloud.add_node(name, labels=labels, scheduling=limit)
    sweep = stack.run("sweep", "--cluster", "dev", "--json")
    assert stack.run("plan", "--inventory", "stack", "--set", "model.preset=tiny").status == 0
    new = stack.recorded.new_json
    assert_format("prices", [new(stack.folder / ".cluster" / "prices.json")], maps=("rates",))
    assert_format("stack", [new(stack.own("stack.json"))], maps=("node_usd",))
    built = ClusterIdentity(identity=CLUSTER, stack="dev")
    settled = [new(stack.own("identity.json")), json.loads(built.to_json())]
    assert_format("cluster_identity", settled)
    assert_format("zones", [new(stack.own("zones.json"))])
    assert_format("host_keys", [new(stack.own("host_keys.json"))], also=ELSEWHERE)
    (plan,) = filter(stack.recorded.is_new, stack.own(".").glob("preview-*.json"))
    assert_format("operation", [read_json(plan)])
    assert_format("output.doctor", [json.loads(doctor.out)])
    assert_format("output.sweep", [json.loads(sweep.out)], maps=("left", "living"))


def test_no_output_of_a_stack_changes_without_its_version() -> None:
    """tests/infra/test_graph.py compares these files with the present program."""
    found = [read_json(path)["outputs"] for path in sorted(GOLDEN.glob("stack.*.json"))]
    assert len(found) > 10
    versions = {each["inventory"]["schema_version"] for each in found}
    assert len(versions) == 1
    assert_keys("stack_outputs", keys_of(found), version=versions.pop())
