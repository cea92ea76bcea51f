"""Updates each machine's expiry label to the time at which Google will end the machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from payload.core.errors import CloudAuthError, CloudError
from payload.machines.inventory import Node
from payload.orchestrate.clouds.gcp.client import REQUEST_S, Google, request_of
from payload.orchestrate.clouds.gcp.compute_resource import get_compute_resource
from payload.orchestrate.clouds.gcp.listing import list_machines
from payload.stack.resource_labels import EXPIRES_LABEL

_SLACK_S = 600.0
"""Largest accepted difference, in seconds, between the expiry in a new machine's label and the
machine's time limit. The label is computed before the machine is created."""


def renew_expiry_labels(google: Google, nodes: Sequence[Node], *, talk: Console) -> float | None:
    """Renew labels with an expiry that is too early.

    Returns when Google ends the last machine, in Unix seconds.

    A machine that replaces an old machine gets the label of the old machine, because Pulumi ignores
    changes of the label. Returns None if no machine has a time limit, or if the machines cannot be
    listed.
    """
    try:
        listed = list_machines(google)
    except (CloudError, CloudAuthError) as error:
        talk.print(f"warning: the machines' expiry labels were not checked: {error}")
        return None
    places = {(node.name, node.zone) for node in nodes}
    ends = []
    for each in listed:
        if (each.name, each.location) not in places or each.ends_unix is None:
            continue
        ends.append(each.ends_unix)
        if each.ends_unix - (each.expires_unix() or 0.0) > _SLACK_S:
            renew_expiry_label(google, name=each.name, zone=each.location, talk=talk)
    return max(ends, default=None)


def renew_expiry_label(google: Google, *, name: str, zone: str, talk: Console) -> None:
    """Update the expiry label of a machine that was just started; `sweep` reads the label."""
    place = {"zone": zone, "instance": name}
    what = f"{name}: label {EXPIRES_LABEL}"
    try:
        found = get_compute_resource(google, "Instances", "GetInstanceRequest", what=what, **place)
        limit_s = found.scheduling.max_run_duration.seconds
        if not limit_s:
            return
        expires = str(int(time.time() + limit_s))
        request = request_of(
            "SetLabelsInstanceRequest",
            project=google.project,
            **place,
            instances_set_labels_request_resource={
                "labels": {**found.labels, EXPIRES_LABEL: expires},
                "label_fingerprint": found.label_fingerprint,
            },
        )
        client = google.compute("Instances")
        google.call(
            what, partial(client.set_labels_unary, request=request, retry=None, timeout=REQUEST_S)
        )
    except (CloudError, CloudAuthError) as error:
        talk.print(f"warning: the machine's expiry label was not updated: {error}")
