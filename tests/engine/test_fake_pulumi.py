"""Compares the fake `pulumi` with recorded output and state of a real one."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from payload.orchestrate.clouds.pulumi.events import Event, parse_event
from payload.orchestrate.clouds.pulumi.locks import are_stale, locks_in
from tests.engine.engine import Done, Engine
from tests.orchestrate.cloud.fake_pulumi import ENGINE
from tests.orchestrate.cloud.standin import CloudStandIn, Fault
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow]
Document = dict[str, Any]
_UP = ("pulumi", "up", "--yes", "--skip-preview")


@pytest.fixture
def fake(tmp_path: Path, cloud: CloudStandIn) -> Iterator[Engine]:
    """Return a stack of two nodes on the fake engine."""
    with Engine(tmp_path / "own", cloud, env=os.environ, is_fake=True) as engine:
        engine.stack("init", "dev")
        engine.env["PULUMI_DEBUG_COMMANDS"] = "true"
        yield engine


def with_events(engine: Engine, *words: str) -> tuple[Done, list[Document]]:
    """Run an operation and return the lines of its event log."""
    log = engine.folder.parent / "events.jsonl"
    log.unlink(missing_ok=True)
    done = engine.pulumi(*words, "--event-log", str(log))
    return done, [json.loads(line) for line in log.read_text().splitlines()]


def recorded(case: str) -> list[Document]:
    """Return the event log of a real engine."""
    return [json.loads(line) for line in (ENGINE / f"{case}.events.jsonl").read_text().splitlines()]


def kinds(events: list[Document]) -> set[str]:
    """Return kind and operation of each event on Google's resources."""
    found = set()
    for event in events:
        (kind,) = event.keys() - {"sequence", "timestamp"}
        step = event[kind].get("metadata")
        if step is None:
            severity = event[kind].get("severity", "")
            found |= {f"{kind} {severity}".strip()} if not severity.startswith("info#") else set()
        elif "gcp:" in step["urn"]:
            found.add(f"{kind} {step['op']}")
    return found - {"diagnosticEvent debug", "diagnosticEvent info"}


def fields(events: list[Document], kind: str) -> set[str]:
    """Return the fields of the first event of this kind, including a step's metadata."""
    body = next(event[kind] for event in events if kind in event)
    return {*body, *body.get("metadata", ())}


def parsed(events: list[Document]) -> list[Event]:
    """Parse the events as `up` and `down` do."""
    return [parse_event(json.dumps(event).encode()) for event in events]


def test_events_are_those_of_a_real_engine(fake: Engine, cloud: CloudStandIn) -> None:
    made, creation = with_events(fake, "up", "--yes", "--skip-preview")
    assert made.returncode == 0, made.stdout
    _, second = with_events(fake, "up", "--yes", "--skip-preview")
    cloud.drop("instances", "dev-node-1")
    cloud.drop("disks", "dev-node-1")
    _, again = with_events(fake, "up", "--yes", "--skip-preview")
    _, gone = with_events(fake, "destroy", "--yes", "--skip-preview")
    _, empty = with_events(fake, "destroy", "--yes", "--skip-preview")
    for events, case in (
        (second, "up-unchanged"),
        (gone, "destroy-success"),
        (empty, "destroy-empty"),
    ):
        assert kinds(events) == kinds(recorded(case))
    lost = {"resOutputsEvent delete"}  # the recorded run started with a refresh, which found it
    assert kinds(again) - lost == kinds(recorded("up-replace-lost-node"))
    for kind in ("preludeEvent", "resourcePreEvent", "resOutputsEvent", "summaryEvent"):
        assert fields(creation, kind) == fields(recorded("up-stockout"), kind)
    assert [event["sequence"] for event in creation] == list(range(1, len(creation) + 1))
    for events in (creation, second, again, gone, empty):
        assert parsed(events)[-2].summary is not None


def test_a_refusal_of_google_reads_as_the_providers(fake: Engine, cloud: CloudStandIn) -> None:
    cloud.add("networks", "dev-network", place="global", labels={})
    done, events = with_events(fake, "up", "--yes", "--skip-preview")
    assert done.returncode == 1
    ends = {"resOpFailedEvent create", "diagnosticEvent error", "summaryEvent", "cancelEvent"}
    assert ends <= kinds(events) and ends <= kinds(recorded("up-exists"))
    said = {each["diagnosticEvent"]["message"] for each in events if "diagnosticEvent" in each}
    words = {
        each["diagnosticEvent"]["message"]
        for each in recorded("up-exists")
        if each.get("diagnosticEvent", {}).get("severity") == "error"
    }
    assert words <= said


def test_a_killed_update_leaves_its_lock_and_what_it_was_doing(
    fake: Engine, cloud: CloudStandIn
) -> None:
    cloud.operation_s = 3600
    process = fake.start(*_UP)
    wait_until(lambda: cloud.count("POST .*/networks") == 1, what="the creation of the network")
    fake.kill(process)
    state = json.loads(fake.pulumi("stack", "export").stdout)["deployment"]
    pending = {(each["type"], each["resource"]["type"]) for each in state["pending_operations"]}
    assert ("creating", "gcp:compute/network:Network") in pending
    assert not any(each["type"].endswith(":Network") for each in state["resources"])
    done = fake.pulumi("up", "--yes", "--skip-preview")
    assert done.returncode == 1
    told = (ENGINE / "up-locked.stderr.txt").read_text()
    shape = r"file://\S+/|[0-9a-f-]{36}|created by .*$"
    assert re.sub(shape, "*", done.stderr, flags=re.M) == re.sub(shape, "*", told, flags=re.M)
    assert are_stale(locks_in(done.stderr))
    cancelled = fake.pulumi("cancel", "--yes")
    assert cancelled.stdout.strip() == (ENGINE / "cancel.stdout.txt").read_text().strip()
    assert fake.locks() == []


@pytest.mark.parametrize("presses", [1, 2])
def test_an_interrupt_ends_after_what_has_begun_and_a_second_at_once(
    fake: Engine, cloud: CloudStandIn, presses: int
) -> None:
    cloud.operation_s = 2.0 if presses == 1 else 3600
    log = fake.folder.parent / "events.jsonl"
    process = fake.start(*_UP, "--event-log", str(log))
    wait_until(lambda: cloud.count("POST .*/networks") == 1, what="the creation of the network")
    for count in range(1, presses + 1):
        os.killpg(process.pid, signal.SIGINT)
        if count < presses:
            wait_until(lambda: "^C received" in log.read_text(), what="the first interrupt")
    assert process.wait(timeout=DEADLINE_S) == 1
    assert fake.locks() == []
    events = [json.loads(line) for line in log.read_text().splitlines()]
    if presses == 1:
        assert kinds(events) == kinds(recorded("up-interrupted"))
        assert list(fake.left()) and "subnetworks" not in fake.left()
        return
    assert "summaryEvent" not in events[-1]
    state = json.loads(fake.pulumi("stack", "export").stdout)["deployment"]
    assert state["pending_operations"]


def test_a_state_that_is_cut_off_is_an_error_and_can_be_put_back(fake: Engine) -> None:
    fake.up()
    before = fake.pulumi("stack", "export").stdout
    (path,) = fake.state.glob(".pulumi/stacks/tileforge/dev.json")
    path.write_text(path.read_text()[:100])
    done = fake.pulumi("stack", "export")
    assert done.returncode == 1
    assert "failed to load checkpoint: unexpected end of JSON input" in done.stderr
    path.with_suffix(".json.bak").replace(path)
    export = fake.folder / "export.json"
    export.write_text(before)
    assert fake.pulumi("stack", "import", "--file", str(export)).returncode == 0
    found = json.loads(fake.pulumi("stack", "export").stdout)["deployment"]["resources"]
    assert found == json.loads(before)["deployment"]["resources"]


def test_requests_are_repeated_as_the_provider_does(fake: Engine, cloud: CloudStandIn) -> None:
    cloud.faults.append(Fault(path="/networks$", method="POST", status=503))
    fake.up()
    assert cloud.count("POST .*/networks") == 2
    cloud.faults.append(Fault(path="/routers/", method="PATCH", status=403))
    done = fake.pulumi("destroy", "--yes")
    assert done.returncode == 1
    assert "Error when reading or editing RouterNat: googleapi: Error 403" in done.stdout
    assert fake.pulumi("destroy", "--yes").returncode == 0
    assert fake.left() == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stack", "select", "none"), "no stack named 'none' found"),
        (("stack", "output", "none"), "does not have output property 'none'"),
        (("up", "--diff"), "unknown flag: --diff"),
        (("stack", "init", "two", "--stack", "two"), "only one of --stack or argument"),
        (("new",), 'unknown command "new" for "pulumi"'),
    ],
)
def test_what_it_does_not_know_is_refused(fake: Engine, words: tuple[str, ...], said: str) -> None:
    done = fake.pulumi(*words)
    assert done.returncode == 1 and said in done.stderr
