"""One resource of Compute Engine by its name."""

from __future__ import annotations

from functools import partial
from typing import Any

from payload.machines.inventory import Node
from payload.orchestrate.clouds.gcp.client import REQUEST_S, Google, request_of


def ask_compute(google: Google, kind: str, request: str, *, what: str, **fields: str) -> Any:
    """Return one resource of Compute Engine. Raises as Google.ask does."""
    client = google.compute(kind)
    asked = request_of(request, project=google.project, **fields)
    return google.ask(what, partial(client.get, request=asked, retry=None, timeout=REQUEST_S))


def compute_instance(google: Google, node: Node) -> Any:
    """Return the machine of a node, as Compute Engine has it. Raises as Google.ask does."""
    place = {"zone": node.zone or "", "instance": node.name}
    return ask_compute(google, "Instances", "GetInstanceRequest", what=node.name, **place)
