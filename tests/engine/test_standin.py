"""The stand-in for Google Cloud: every stack variant, and each of its rules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engine import missing
from tests.engine.provider import Provider, RefusedRequestError
from tests.engine.variants import VARIANTS
from tests.infra.stacks import Recorded, deploy
from tests.orchestrate.cloud.fake_pulumi import FakePulumi
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE, CloudStandIn, Fault

Document = dict[str, Any]
EACH_RULE = (
    *("default", "one-node", "direct", "c4", "bucket", "filestore", "n4-spot", "c3-ssd"),
    *("c3-tier-1", "confidential-spot", "europe", "own-bucket", "a100-spot"),
)
"""Variants of each kind of machine, disk, access, storage and region, for `make test`."""


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return the program's default resources for two nodes."""
    folder = tmp_path_factory.mktemp("stack")
    return deploy({"project": PROJECT, "nodeCount": 2}, folder=folder)


def left(cloud: CloudStandIn) -> dict[str, int]:
    """Return the number of resources by kind, without those that existed before."""
    found = {kind: len(items) for (kind, _), items in cloud.items.items() if items}
    return found | ({"buckets": n} if (n := len(cloud.buckets) - 1) else {})


def test_there_are_thirty_one_variants() -> None:
    assert len(VARIANTS) == 31


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in EACH_RULE else pytest.mark.slow) for name in VARIANTS],
)
def test_every_variant_comes_up_and_goes(cloud: CloudStandIn, tmp_path: Path, name: str) -> None:
    settings = {"project": PROJECT, **VARIANTS[name]}
    provider = Provider(url=cloud.url, recorded=deploy(settings, folder=tmp_path))
    cloud.operation_s = 0.001 if name == "default" else 0.0
    provider.up()
    there = left(cloud)
    assert there["instances"] == there["disks"] == settings.get("nodeCount", 3)
    assert there["firewalls"] == 5 + (settings.get("sharedStorage") == "filestore")
    assert there["serviceAccounts"] == 1
    assert all(
        each["status"] == "RUNNING"
        for (kind, _), items in cloud.items.items()
        if kind == "instances"
        for each in items
    )
    provider.down()
    kept = {"buckets": 1} if settings.get("bucket") == "create" else {}
    assert left(cloud) == kept


def changed(recorded: Recorded, kind: str, change: Callable[[Document], object]) -> Recorded:
    """Return the resources with every resource of the type changed."""
    resources = copy.deepcopy(recorded.resources)
    for each in resources:
        if each["type"].endswith(f":{kind}"):
            change(each["inputs"])
    return Recorded(resources=resources, outputs=recorded.outputs)


def on_disk(**values: Any) -> Callable[[Document], object]:
    return lambda inputs: inputs["bootDisk"]["initializeParams"].update(values)


def scheduled(**values: Any) -> Callable[[Document], object]:
    return lambda inputs: inputs["scheduling"].update(values)


def with_values(**values: Any) -> Callable[[Document], object]:
    return lambda inputs: inputs.update(values)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("Instance", on_disk(type="pd-standard"), "[pd-standard] features are not compatible"),
        ("Instance", on_disk(provisionedIops=3000), "Provisioned IOPS cannot be specified"),
        ("Instance", with_values(machineType="n4-standard-8"), "[pd-balanced] features are not"),
        ("Instance", scheduled(onHostMaintenance="MIGRATE"), "must have onHostMaintenance TERMI"),
        ("Instance", scheduled(automaticRestart=True), "and no automaticRestart"),
        ("Instance", scheduled(maxRunDuration={"seconds": 10}), "maxRunDuration 10 is out of"),
        ("Instance", scheduled(instanceTerminationAction=""), "needs an instanceTerminationAct"),
        (
            "Instance",
            with_values(networkPerformanceConfig={"totalEgressBandwidthTier": "TIER_1"}),
            "c3-highmem-8 does not support TIER_1",
        ),
        (
            "Instance",
            with_values(confidentialInstanceConfig={"confidentialInstanceType": "TDX"}),
            "c3-highmem-8 does not support confidential instance type TDX",
        ),
        ("Instance", with_values(name="Node_0"), "Invalid value for field 'resource.name'"),
        ("Firewall", with_values(network="global/networks/none"), "networks/none' was not found"),
        ("Subnetwork", with_values(network="global/networks/none"), "networks/none' was not"),
        (
            "Instance",
            with_values(resourcePolicies=f"regions/{REGION}/resourcePolicies/none"),
            "resourcePolicies/none' was not found",
        ),
        ("Account", with_values(accountId="other"), "of type 'serviceAccount' was not found"),
    ],
)
def test_what_google_refuses_is_refused(
    cloud: CloudStandIn,
    default: Recorded,
    kind: str,
    change: Callable[[Document], object],
    words: str,
) -> None:
    provider = Provider(url=cloud.url, recorded=changed(default, kind, change))
    with pytest.raises(RefusedRequestError) as caught:
        provider.up()
    assert words in str(caught.value)
    assert ": 400: " in str(caught.value) or ": 404: " in str(caught.value)


@pytest.mark.parametrize("machine", ["n4-standard-8", "c4-standard-8"])
def test_compact_placement_is_for_families_that_have_it(
    cloud: CloudStandIn, default: Recorded, machine: str
) -> None:
    def change(inputs: Document) -> None:
        inputs["machineType"] = machine
        inputs["bootDisk"]["initializeParams"]["type"] = "hyperdisk-balanced"

    provider = Provider(url=cloud.url, recorded=changed(default, "Instance", change))
    with pytest.raises(RefusedRequestError, match="does not support resource policies of group"):
        provider.up()


def test_a_name_that_is_taken_is_a_409(cloud: CloudStandIn, default: Recorded) -> None:
    cloud.add("networks", "dev-network", place="global", labels={})
    with pytest.raises(RefusedRequestError, match=r"409: The resource .* already exists"):
        Provider(url=cloud.url, recorded=default).up()


def test_what_is_in_use_stays(cloud: CloudStandIn, default: Recorded) -> None:
    provider = Provider(url=cloud.url, recorded=default)
    provider.up()
    for path, user in {
        "global/networks/dev-network": "dev-",
        f"regions/{REGION}/subnetworks/dev-subnet": "dev-",
        f"regions/{REGION}/resourcePolicies/dev-placement": "dev-node-0",
        f"zones/{ZONE}/disks/dev-node-0": "dev-node-0",
    }.items():
        with pytest.raises(RefusedRequestError, match=f"is already being used by .*{user}"):
            provider.request("DELETE", f"/compute/v1/projects/{PROJECT}/{path}", None)
    with pytest.raises(RefusedRequestError, match="MTU of a network changes only while"):
        path = f"/compute/v1/projects/{PROJECT}/global/networks/dev-network"
        provider.request("PATCH", path, {"mtu": 1460})
    node = f"/compute/v1/projects/{PROJECT}/zones/{ZONE}/instances/dev-node-0"
    with pytest.raises(RefusedRequestError, match="must be stopped for updateShielded"):
        provider.request("PATCH", f"{node}/updateShieldedInstanceConfig", {})
    provider.request("POST", f"{node}/stop", {})
    provider.request("PATCH", f"{node}/updateShieldedInstanceConfig", {"enableSecureBoot": False})
    provider.request("POST", f"{node}/start", {})
    provider.request("POST", f"{node}/setTags", {"items": ["a"]})
    assert left(cloud)["instances"] == 2


def test_stock_outs_and_quotas_end_the_operation(cloud: CloudStandIn, default: Recorded) -> None:
    cloud.stocked_out = {ZONE}
    provider = Provider(url=cloud.url, recorded=default)
    with pytest.raises(RefusedRequestError, match="ZONE_RESOURCE_POOL_EXHAUSTED"):
        provider.up()
    provider.down()
    assert left(cloud) == {}
    cloud.stocked_out.clear()
    cloud.regions[REGION] = {"C3_CPUS": (8.0, 0.0)}
    with pytest.raises(RefusedRequestError, match=r"Quota 'C3_CPUS' exceeded.  Limit: 8.0"):
        provider.up()
    assert left(cloud)["instances"] == 1
    provider.down()
    assert left(cloud) == {}


def test_an_answer_can_be_lost_after_the_creation(cloud: CloudStandIn, default: Recorded) -> None:
    cloud.faults.append(Fault(path="/networks$", method="POST", status=503, after=True))
    provider = Provider(url=cloud.url, recorded=default)
    with pytest.raises(RefusedRequestError, match=": 503: "):
        provider.up()
    assert left(cloud) == {"networks": 1, "serviceAccounts": 1}
    cloud.faults.append(Fault(path="/networks$", method="POST", status=0, after=True))
    with pytest.raises(OSError, match=r"closed connection|reset"):
        provider.request("POST", f"/compute/v1/projects/{PROJECT}/global/networks", {})


def test_the_group_engine_says_what_it_lacks(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    assert missing(env) == "there is no `pulumi` on PATH"
    FakePulumi(tmp_path)
    assert missing(env).startswith("Google's provider is not installed (resource-gcp-v")
    provider = tmp_path / "bin" / "pulumi-resource-gcp"
    provider.write_text("#!/bin/sh\n")
    provider.chmod(0o755)
    assert missing(env) == ""
