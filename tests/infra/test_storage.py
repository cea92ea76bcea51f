"""Only nodes of a cluster with a bucket get the client library for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.infra.stacks import deploy
from tests.infra.test_cloud_init import written_files


@pytest.mark.parametrize(
    ("settings", "extras"),
    [
        ({}, "train"),
        ({"bucket": "create"}, "train,storage"),
        ({"bucket": "mine-already"}, "train,storage"),
        ({"bucket": "create", "monitoring": "prometheus"}, "train,monitor,storage"),
    ],
)
def test_a_node_is_installed_for_its_bucket(
    tmp_path: Path, settings: dict[str, Any], extras: str
) -> None:
    instances = deploy(settings, folder=tmp_path).of_type("Instance")
    for instance in instances:
        conf = written_files(str(instance["metadata"]["user-data"]))[
            "/etc/tileforge/bootstrap.conf"
        ]
        assert f"EXTRAS={extras}\n" in conf.decode()
