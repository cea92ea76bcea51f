"""Responses that Google's client library cannot parse: one error line, and the rest continues."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.stacks import Capture, destroys, head_says, own_key
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE, Fault

pytestmark = pytest.mark.processes

NULL_IN_A_LIST = '{"labels": null, "items": [null, {"name": null}], "quotas": [null]}'
CREATED = re.compile(r'"(creationTimestamp|timeCreated)": "[^"]*"')
BREAKS: dict[str, Callable[[str], str]] = {
    "null in a list": lambda text: NULL_IN_A_LIST,
    "no document": lambda text: "<html>502</html>",
    "a time in another format": lambda text: CREATED.sub(r'"\1": {"seconds": 1795408579}', text),
}


def break_answers(site: Site, pattern: str, how: str) -> None:
    """Damage responses to these paths in this way."""

    def tamper(target: str, document: dict[str, Any]) -> bytes | None:
        if not re.search(pattern, target):
            return None
        return BREAKS[how](json.dumps(document)).encode()

    site.cloud.tamper = tamper


@pytest.fixture
def mine(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a cluster that is up, and a Pulumi that builds and destroys it."""
    site.build(nodes=1)
    head_says(monkeypatch)
    own_key(site)
    site.pulumi.on("up", out="done\n")
    destroys(site)
    return site


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize(
    ("path", "blind"),
    [
        ("aggregated/instances", "instances"),
        ("global/networks", "networks"),
        ("aggregated/routers", "routers"),
        ("/storage/v1/b", "buckets"),
    ],
)
def test_sweep_looks_at_all_else_and_says_what_it_could_not_read(
    mine: Site, capsys: Capture, how: str, path: str, blind: str
) -> None:
    break_answers(mine, path, how)
    options = ("--cluster", "mine", "--project", PROJECT)
    assert main(["sweep", *options], mine.env) == ExitCode.TEARDOWN
    out, err = capsys.readouterr()
    assert f"listing {blind}: Google Cloud's response cannot be parsed (" in err
    assert err.splitlines()[-1].startswith("error: ") and "Traceback" not in err
    rows = {
        "instances": "instance +mine-0",
        "networks": "network +mine-network",
        "routers": "router +mine-router",
        "buckets": "bucket +mine-results",
    }
    for kind, row in rows.items():
        assert bool(re.search(row, out)) == (kind != blind), kind


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("path", ["aggregated/instances", "global/networks"])
def test_down_destroys_and_ends_with_60(mine: Site, capsys: Capture, how: str, path: str) -> None:
    # Another cluster's machines, because an empty list has no time to damage.
    mine.cloud.add_node("other-0", labels={})
    mine.cloud.add("networks", "other", place="global", labels={})
    destroys(mine, leaves=("other-0", "other"))
    break_answers(mine, path, how)
    assert main(["down", "--yes"], mine.env) == ExitCode.TEARDOWN
    err = capsys.readouterr().err
    assert "2/3 destroy: done" in err and "3/3 sweep: not clean" in err
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and "Google Cloud's response cannot be parsed" in last


def test_down_that_reaches_nobody_ends_with_60(mine: Site, capsys: Capture) -> None:
    """The destroy succeeded, but leftovers cannot be listed."""
    mine.cloud.faults.append(Fault(path="aggregated/instances", status=400, times=99))
    assert main(["down", "--yes"], mine.env) == ExitCode.TEARDOWN
    last = capsys.readouterr().err.splitlines()[-1]
    assert "leftovers of mine could not be listed" in last
    assert f"sweep --cluster mine --project {PROJECT}" in last


@pytest.mark.parametrize("how", ["null in a list", "no document"])
def test_up_says_what_is_up_before_it_says_that_the_firewall_cannot_be_read(
    mine: Site, capsys: Capture, how: str
) -> None:
    mine.pulumi.replay("up-unchanged", status=0)
    break_answers(mine, "global/firewalls", how)
    assert main(["up", "--yes"], mine.env) == ExitCode.PREFLIGHT
    *_, before, _, last = capsys.readouterr().err.splitlines()
    assert before.startswith("cluster mine: 1 node(s), $1.59/h")
    assert "error: listing firewall rules: Google Cloud's response cannot be parsed" in last


@pytest.mark.parametrize("how", ["null in a list", "no document"])
@pytest.mark.parametrize(
    ("path", "unknown"),
    [(f"projects/{PROJECT}([?]|$)", "Compute Engine"), (f"regions/{REGION}", "quotas")],
)
def test_doctor_goes_on_to_the_next_check(
    mine: Site, capsys: Capture, how: str, path: str, unknown: str
) -> None:
    mine.cloud.regions[REGION] = {"C3_CPUS": (100.0, 0.0)}
    mine.cloud.project_quotas = {"NETWORKS": (5.0, 1.0)}
    for kind, name in (("machineTypes", "c3-highmem-8"), ("diskTypes", "pd-balanced")):
        mine.cloud.add(kind, name, place=ZONE, labels={}, guestCpus=8)
    break_answers(mine, path, how)
    assert main(["doctor", "--json"], mine.env) == ExitCode.OK
    out, err = capsys.readouterr()
    checks = {each["name"]: each for each in json.loads(out)["checks"]}
    assert checks[unknown]["outcome"] == "unknown"
    assert "response cannot be parsed" in checks[unknown]["fix"]
    assert checks["policy iam.disableServiceAccountCreation"]["outcome"] == "ok"
    assert checks["price"]["outcome"] == "ok" and "could not be checked" in err
