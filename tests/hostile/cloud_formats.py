"""Pulumi's output, and the local files about a cluster in Google Cloud."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from payload.orchestrate.clouds.cluster_records import ClusterRecord, load_cluster_record
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import EventReader, Update
from payload.orchestrate.clouds.pulumi.previews import machines_that_go
from payload.orchestrate.clouds.pulumi.stack_config import cluster_name, settings
from payload.orchestrate.clouds.pulumi.stack_outputs import read_outputs
from payload.orchestrate.clouds.pulumi.stack_state import stack_state
from payload.stack.cloud_requirements import text_list
from tests.hostile.formats import INVENTORY, Format, in_file


class Printing(Pulumi):
    """A `pulumi` that prints a given text."""

    def __init__(self, folder: Path, content: bytes) -> None:
        super().__init__({}, folder=folder)
        self._content = content

    def ask(self, *words: str, timeout_s: float | None = None) -> str:
        return self._content.decode(errors="replace")


def cloud_formats(folder: Path) -> Iterator[Format]:
    """The answers of `pulumi`, and the files in .cluster."""

    def printed(name: str, document: Any, read: Callable[[Pulumi], object]) -> Format:
        def act(content: bytes) -> object:
            return read(Printing(folder, content))

        return Format(name, json.dumps(document).encode(), act)

    own = folder / ".cluster" / "dev"
    own.mkdir(parents=True)
    yield printed("pulumi stack output", _OUTPUTS, read_outputs)
    yield printed("pulumi stack export", {"deployment": {"resources": [_RESOURCE]}}, stack_state)
    yield Format("an event of Pulumi's engine", json.dumps(_EVENT).encode(), _preview)
    yield printed("pulumi config", _CONFIG, _settings)
    known = ClusterRecord(cluster="dev", project="p-1", region="us-central1", node_usd={"n": 0.5})
    (own / "stack.json").write_text(json.dumps({"schema_version": 1, **asdict(known)}))
    yield in_file(own / "stack.json", lambda: load_cluster_record(folder, "dev"))


def _preview(content: bytes) -> object:
    reader = EventReader(io.BytesIO(content + b"\n"))
    events = tuple(reader.read())
    return machines_that_go(
        Update(arguments=["preview"], status=0, events=events, unreadable=reader.unreadable)
    )


def _settings(pulumi: Pulumi) -> object:
    known = settings(pulumi)
    return cluster_name(pulumi, known), text_list(known.get("zones"))


_OUTPUTS = {
    "inventory": json.loads(INVENTORY.to_json()),
    "project": "my-project",
    "region": "us-central1",
    "hourly_usd": 1.59,
    "expires": "2026-11-22T10:00:00+00:00",
}
_RESOURCE = {
    "urn": "urn:pulumi:dev::tileforge::gcp:compute/instance:Instance::dev-node-0",
    "id": "projects/p/zones/z/instances/dev-node-0",
}
_EVENT = {"timestamp": 1, "resourcePreEvent": {"metadata": {"op": "delete", **_RESOURCE}}}
_CONFIG = {
    "gcp:project": {"value": "my-project", "secret": False},
    "tileforge:cluster": {"value": "dev", "secret": False},
    "tileforge:zones": {"value": '["us-central1-a"]', "secret": False},
}
