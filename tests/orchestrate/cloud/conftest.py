"""Fixtures: a cloud with a cluster, a `pulumi` with its stack, and a project folder."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.gcp.labels import mark
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.endpoints import VARIABLE, Endpoints
from tests.orchestrate.cloud.fake_pulumi import FakePulumi
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE, CloudStandIn
from tests.support.identities import cluster_labels, write_cluster_identity
from tests.support.launching import REPO

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIGhvc3Qga2V5IHRoYXQgdGhlIHRlc3RzIHBpbiwgMzJi"


class Site:
    """An operator's project folder, `pulumi`, and cloud."""

    def __init__(self, folder: Path, cloud: CloudStandIn) -> None:
        self.folder = folder
        self.cloud = cloud
        self.pulumi = FakePulumi(folder)
        self.env = {"PATH": f"{self.pulumi.bin}", VARIABLE: cloud.url, "HOME": str(folder)}
        # Child processes use the same user's key.
        self.env |= {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
        self.sleeps: list[float] = []
        self.configure(cluster="mine", project=PROJECT, zones=[ZONE])
        write_cluster_identity(folder, "mine")
        self.pulumi.machines()
        shutil.copy(REPO / "Pulumi.yaml", folder)

    def google(self, **more: Any) -> Google:
        """Return the project's client, whose waits take no time."""
        values = {"sleep": self.sleeps.append, **more}
        return Google(PROJECT, endpoints=Endpoints.from_env(self.env), **values)

    def configure(self, **values: Any) -> None:
        """Set the output of `pulumi config --json`."""
        document = {
            f"tileforge:{key}": {"value": json.dumps(value), "objectValue": value}
            if isinstance(value, list)
            else {"value": str(value)}
            for key, value in values.items()
        }
        self.pulumi.on("config", "--json", out=json.dumps(document))

    def build(self, *, cluster: str = "mine", nodes: int = 3, expires_in_s: float = 3600) -> None:
        """Create the result of `pulumi up`: resources in the cloud, and the stack's outputs."""
        write_cluster_identity(self.folder, cluster)
        labels = cluster_labels(cluster, expires=int(time.time() + expires_in_s))
        names = [f"{cluster}-{i}" for i in range(nodes)]
        for name in names:
            self.cloud.add_node(name, labels=labels)
            self.cloud.add("disks", name, place=ZONE, labels=labels)
            self.cloud.guest_attributes[name] = {"ssh-ed25519": KEY}
        network, description = f"{cluster}-network", mark(labels)
        self.cloud.add("networks", network, place="global", labels={}, description=description)
        url = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/global/networks/{network}"
        for kind, name, place in (
            ("subnetworks", f"{cluster}-subnet", REGION),
            ("routers", f"{cluster}-router", REGION),
            ("firewalls", f"{cluster}-allow-ssh", "global"),
        ):
            self.cloud.add(kind, name, place=place, labels={}, network=url, description=description)
        self.cloud.add(
            "resourcePolicies",
            f"{cluster}-placement",
            place=REGION,
            labels={},
            description=description,
        )
        self.cloud.add_service_account(
            f"{cluster}-nodes",
            shown=f"Nodes of the Tileforge cluster {cluster}",
            description=description,
        )
        self.cloud.add_bucket(f"{cluster}-results", labels=labels)
        self.pulumi.outputs(
            inventory=inventory_output(cluster, names),
            hourly_usd=1.5877,
            expires="2026-11-22T08:00:00Z",
            project=PROJECT,
            region=REGION,
        )


def inventory_output(cluster: str, names: list[str], **more: Any) -> dict[str, Any]:
    """Return the output `inventory`, without host keys."""
    return {
        "schema_version": 1,
        "cluster": cluster,
        "source": "pulumi",
        "ssh_user": "trainer",
        "access": {"kind": "iap", "project": PROJECT},
        "bucket": f"{cluster}-results",
        "nodes": [
            {
                "name": name,
                "address": f"10.0.0.{place + 2}",
                "zone": ZONE,
                "machine_type": "c3-highmem-8",
                "physical_cores": 4,
                "memory_gib": 64,
                "hourly_usd": 0.52923,
            }
            for place, name in enumerate(names)
        ],
        **more,
    }


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Return an operator's project folder as current folder, with nothing up."""
    monkeypatch.chdir(tmp_path)
    with CloudStandIn() as cloud:
        yield Site(tmp_path, cloud)


def read_json(path: Path) -> Any:
    """Return the JSON document in a file."""
    return json.loads(path.read_text(encoding="utf-8"))
