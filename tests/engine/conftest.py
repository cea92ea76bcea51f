"""Deselects tests that need Pulumi's engine if it is missing, and reports it; shared fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.engine import Engine, missing
from tests.engine.variants import CRYPTO_KEY
from tests.orchestrate.cloud.standin import CloudStandIn
from tests.support.left_out import leave_out


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need the engine if it is not installed."""
    problem = missing(os.environ)
    if problem:
        engine = [item for item in items if item.get_closest_marker("engine")]
        why = f"of Pulumi's engine (make test-engine): {problem}."
        leave_out(config, items, engine, folder="tests/engine", why=why)


@pytest.fixture
def cloud() -> Iterator[CloudStandIn]:
    """Return a stand-in project where all resources are available, with a bucket and a key."""
    with CloudStandIn() as cloud:
        cloud.sells_everything = True
        cloud.services |= {"cloudkms", "cloudresourcemanager", "dns"}
        cloud.key_members[CRYPTO_KEY] = []
        cloud.add_bucket("acme-results", labels={})
        yield cloud


@pytest.fixture(
    params=[
        pytest.param(True, id="fake", marks=pytest.mark.processes),
        pytest.param(False, id="real", marks=pytest.mark.engine),
    ]
)
def engine(request: pytest.FixtureRequest, tmp_path: Path, cloud: CloudStandIn) -> Iterator[Engine]:
    """Return a project folder without keys, with local state and the stack `dev`."""
    with Engine(tmp_path / "own", cloud, env=os.environ, is_fake=request.param) as engine:
        engine.stack("init", "dev")
        yield engine
