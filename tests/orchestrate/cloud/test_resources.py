"""Maps resources to clusters, and excludes other users' resources."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from infra.gcp.labels import cluster_labels, mark
from payload.orchestrate.clouds.gcp.cluster_of_resource import by_cluster, expiry_of
from payload.orchestrate.clouds.gcp.removal_order import Resource, labels_in_description
from tests.infra.stacks import CASES
from tests.support.golden_files import GOLDEN
from tests.support.identities import CLUSTER

UNLABELLED = {
    "Network": "network",
    "Subnetwork": "subnetwork",
    "Router": "router",
    "Firewall": "firewall rule",
    "ResourcePolicy": "resource policy",
}
"""Kinds by the last part of their type in the cluster program."""
ELSEWHERE = {
    *("Instance", "Bucket", "RouterNat", "BucketIAMMember", "Account", "ManagedZone"),
    *("RecordSet", "CryptoKeyIAMMember"),
}
"""Types that have labels, belong to another resource, or are not in Compute Engine."""


def names(owned: dict[str, list[Resource]]) -> dict[str, list[str]]:
    return {cluster: [each.name for each in found] for cluster, found in owned.items()}


def made(case: str) -> list[Resource]:
    """Return the cluster program's resources without labels, as Google lists them."""
    graph = json.loads((GOLDEN / f"stack.{case}.json").read_text(encoding="utf-8"))
    return [
        Resource(
            kind=UNLABELLED[word],
            name=inputs["name"],
            location="global",
            labels=labels_in_description(inputs["description"]),
            network=inputs["network"].removesuffix("-id") if "network" in inputs else None,
        )
        for resource in graph["resources"]
        if resource["type"].startswith("gcp:")
        and (word := resource["type"].rpartition(":")[2]) not in ELSEWHERE
        for inputs in [resource["inputs"]]
    ]


def without_marks(resources: Sequence[Resource]) -> list[Resource]:
    """Return the resources of older versions, which had no descriptions."""
    return [
        Resource(kind=r.kind, name=r.name, location=r.location, network=r.network)
        for r in resources
    ]


@pytest.mark.parametrize("case", CASES)
def test_all_that_the_program_makes_is_known_by_description_and_by_name(case: str) -> None:
    resources = made(case)
    assert len(resources) >= 6
    assert names(by_cluster(resources)) == names(
        by_cluster(without_marks(resources), known=["dev"])
    )
    assert len(by_cluster(resources)["dev"]) == len(resources)
    assert expiry_of(resources) == 1_800_000_000 + 12 * 3600


def test_what_only_begins_like_a_clusters_name_is_somebody_elses() -> None:
    strangers = [
        Resource(kind="network", name="dev-vpc", location="global"),
        Resource(kind="router", name="dev-nat-router", location="r", network="dev-vpc"),
        # The program's names in another network, including Google's own names.
        Resource(kind="router", name="dev-router", location="r", network="dev-vpc"),
        Resource(
            kind="firewall rule", name="default-allow-ssh", location="global", network="default"
        ),
        Resource(kind="network", name="default", location="global"),
        Resource(kind="network", name="dev", location="global"),
        Resource(kind="network", name="dev-b-network", location="global"),
        Resource(kind="resource policy", name="dev-b-placement", location="r"),
        Resource(kind="disk", name="dev-disk", location="z"),
        Resource(kind="bucket", name="dev-results", location="us"),
    ]
    assert by_cluster(strangers, known=["dev", "default"]) == {}


def test_in_a_network_that_is_a_clusters_by_name_alone_only_its_own_things_are() -> None:
    resources = [
        Resource(kind="network", name="dev-network", location="global"),
        Resource(kind="router", name="dev-router", location="r", network="dev-network"),
        Resource(kind="firewall rule", name="web", location="global", network="dev-network"),
        Resource(kind="instance", name="web-1", location="z", network="dev-network"),
    ]
    assert names(by_cluster(resources, known=["dev"])) == {"dev": ["dev-router", "dev-network"]}


def test_a_label_or_a_description_goes_before_a_name() -> None:
    a, b = (
        cluster_labels(cluster=name, identity=CLUSTER, expires_unix=1, extra={"owner": "ada"})
        for name in ("a", "a-b")
    )
    resources = [
        Resource(kind="instance", name="x", location="z", labels=a),
        Resource(
            kind="network",
            name="a-network",
            location="global",
            labels=labels_in_description(mark(b)),
        ),
        Resource(kind="firewall rule", name="hand", location="global", network="a-network"),
        Resource(kind="instance", name="y", location="z", labels=a, network="a-network"),
    ]
    assert names(by_cluster(resources)) == {"a": ["x", "y"], "a-b": ["hand", "a-network"]}


@pytest.mark.parametrize(
    ("description", "found"),
    [
        ("", {}),
        ("made for tileforge-cluster=", {}),
        ("not-tileforge-cluster=a", {}),
        ("tileforge-cluster=a,b", {}),
        (
            "SSH. tileforge-cluster=a-b tileforge-expires=17",
            {"tileforge-cluster": "a-b", "tileforge-expires": "17"},
        ),
    ],
)
def test_a_description_says_what_labels_would(description: str, found: dict[str, str]) -> None:
    assert labels_in_description(description) == found
