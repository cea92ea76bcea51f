"""Reads one resource of Compute Engine by its name."""

from __future__ import annotations

from functools import partial
from typing import Any

from payload.machines.inventory import Node
from payload.orchestrate.clouds.gcp.client import REQUEST_S, Google, request_of


def get_compute_resource(
    google: Google, kind: str, request: str, *, what: str, **fields: str
) -> Any:
    """Return one resource of Compute Engine. Raises the errors of Google.call."""
    client = google.compute(kind)
    message = request_of(request, project=google.project, **fields)
    return google.call(what, partial(client.get, request=message, retry=None, timeout=REQUEST_S))


def compute_instance(google: Google, node: Node) -> Any:
    """Return Compute Engine's instance of a node. Raises the errors of Google.call."""
    place = {"zone": node.zone or "", "instance": node.name}
    return get_compute_resource(google, "Instances", "GetInstanceRequest", what=node.name, **place)
