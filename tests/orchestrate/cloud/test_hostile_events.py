"""Hostile or damaged events of Pulumi's engine, field by field."""

from __future__ import annotations

import io
import json
from functools import partial
from typing import Any

import pytest

from payload.orchestrate.clouds.pulumi.events import EventReader, Update
from payload.orchestrate.clouds.pulumi.failures import explain
from payload.orchestrate.clouds.pulumi.firewall_drift import expected_rules
from payload.orchestrate.clouds.pulumi.previews import machines_that_go
from payload.orchestrate.clouds.pulumi.progress import Progress
from payload.orchestrate.clouds.pulumi.rollback import remaining
from tests.orchestrate.cloud.test_hostile_answers import BODIES, URN, is_sound, places, with_value
from tests.orchestrate.test_inventory_fuzz import HOSTILE

RULE = {
    "name": "mine-allow-ssh",
    "network": "projects/p/global/networks/mine-network",
    "priority": 1000,
    "sourceRanges": ["35.235.240.0/20"],
    "allows": [{"protocol": "tcp", "ports": ["22"]}],
}
STACK = "urn:pulumi:dev::tileforge::pulumi:pulumi:Stack::tileforge-dev"
INVENTORY = {"inventory": {"nodes": [{"name": "mine-0", "hourly_usd": 0.5}]}}
EVENTS = [
    {"timestamp": 1, "diagnosticEvent": {"message": "no", "severity": "error", "urn": URN}},
    {"timestamp": 2, "resourcePreEvent": {"metadata": {"op": "delete", "urn": URN}}},
    {
        "timestamp": 3,
        "resourcePreEvent": {
            "metadata": {
                "op": "same",
                "urn": URN.replace("instance:Instance", "firewall:Firewall"),
                "new": {"inputs": RULE},
            }
        },
    },
    {
        "timestamp": 4,
        "resOpFailedEvent": {
            "metadata": {"op": "update", "urn": URN, "diffs": ["a"], "detailedDiff": {"a": {}}}
        },
    },
    {
        "timestamp": 5,
        "resOutputsEvent": {
            "metadata": {"op": "same", "urn": STACK, "new": {"outputs": INVENTORY}}
        },
    },
    {"timestamp": 6, "policyEvent": {"message": "m", "policyName": "p", "enforcementLevel": "x"}},
    {"timestamp": 7, "summaryEvent": {"resourceChanges": {"create": 1}}},
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: list(event)[-1])
def test_every_field_of_an_event_of_the_engine_may_be_hostile(event: dict[str, Any]) -> None:
    others = [json.dumps(each).encode() for each in EVENTS if each is not event]

    def read(content: bytes) -> object:
        reader = EventReader(io.BytesIO(b"\n".join([content, *others, b""])))
        progress = Progress("pulumi up", say=str)
        for each in reader.read():
            progress.handle(each)
        progress.table()
        update = Update(
            arguments=["up"], status=1, events=reader.seen, unreadable=reader.unreadable
        )
        message = str(explain(update))
        assert message.isprintable() and len(message) < 2_000
        assert remaining(["mine-0"], update).isprintable()
        expected_rules(update)
        return machines_that_go(update)

    assert is_sound(partial(read, json.dumps(event).encode()))
    for path in places(event):
        for value in HOSTILE:
            is_sound(partial(read, json.dumps(with_value(event, path, value)).encode()))
    for body in BODIES:
        is_sound(partial(read, body))


def test_an_event_without_an_end_is_not_waited_for_in_memory() -> None:
    stream = io.BytesIO(b"{" * (2**25 + 2**21))
    reader = EventReader(stream)
    assert list(reader.read()) == [] and "is too long" in reader.unreadable
