"""`up --next-zone`: the order of the config's zones, and the confirmations."""

from __future__ import annotations

import json
import time

import pytest

from payload.core.errors import INTERRUPTED, ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.commands import results_at_stake
from payload.orchestrate.commands.head_runs import Head
from payload.stack.operator_key_file import make_operator_key
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.stacks import Answers, Capture, copy_of_run, own_key, words
from tests.orchestrate.cloud.standin import PROJECT
from tests.orchestrate.cloud.test_failures import DETAILS, NOT_OFFERED, PLAIN, PREEMPTED

pytestmark = pytest.mark.processes


def test_next_zone_moves_on_through_the_configs_zones(site: Site, capsys: Capture) -> None:
    zones = ["us-central1-f", "us-central1-c", "us-central1-b"]
    site.build()
    site.configure(cluster="mine", project=PROJECT, zones=zones)
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out="done\n")
    site.pulumi.on("up", out=PLAIN, status=255, times=1)
    site.pulumi.on("up", out=DETAILS, status=255, times=1)
    assert main(["up", "--yes", "--next-zone"], site.env) == ExitCode.OK
    said = words(site)
    assert said.count("up --yes --skip-preview") == 3
    # b first, because the error suggests it; then the rest of the order.
    firsts = [each for each in said if each.startswith("config set --path zones[0]")]
    assert firsts == [f"config set --path zones[0] us-central1-{zone}" for zone in "bc"]
    assert "--next-zone: building in us-central1-b" in capsys.readouterr().err


def test_next_zone_ends_with_the_last_one(site: Site, capsys: Capture) -> None:
    zones = ["us-central1-f", "us-central1-c"]
    site.configure(cluster="mine", project=PROJECT, zones=json.dumps(zones))
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out=PLAIN, status=255)
    words_of_up = ["up", "--yes", "--next-zone", "--keep-on-failure"]
    assert main(words_of_up, site.env) == ExitCode.NO_CAPACITY
    last = capsys.readouterr().err.splitlines()[-1]
    assert "Tried zones of the config: us-central1-f, us-central1-c" in last


def test_next_zone_needs_a_next_zone(site: Site, capsys: Capture) -> None:
    site.configure(cluster="mine", project=PROJECT, zones=["us-central1-a"])
    assert main(["up", "--yes", "--next-zone"], site.env) == ExitCode.CONFIG
    assert "--next-zone: the config has 1 zone(s)" in capsys.readouterr().err
    assert words(site) == []


def test_next_zone_does_not_leave_results_behind_in_the_old_one(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_operator_key(site.folder / "key")
    site.build()
    site.configure(cluster="mine", project=PROJECT, zones=["us-central1-f", "us-central1-b"])
    own_key(site)
    site.pulumi.machines("mine-0", "mine-1")
    site.pulumi.on("preview", out="+ 1 to create\n")
    site.pulumi.on("up", out=DETAILS, status=255)
    copy_of_run(site, "one", alive=True)
    assert main(["up", "--yes", "--next-zone"], site.env) == ExitCode.CONFIG
    err = capsys.readouterr().err
    assert "this deletes 2 machine(s) with all their data: mine-0, mine-1" in err
    last = err.splitlines()[-1]
    assert "cannot determine if a run is active, so the cluster stays in its zone" in last
    # The head reports no run: results missing in this folder must still be collected.
    monkeypatch.setattr(results_at_stake, "query_head", lambda *_, **__: Head())
    assert main(["up", "--yes", "--next-zone"], site.env) == ExitCode.SSH_UNREACHABLE
    last = capsys.readouterr().err.splitlines()[-1]
    assert "run one could not be collected, so the cluster stays in its zone" in last
    # A no leaves everything where it is, too.
    monkeypatch.setattr("sys.stdin", Answers("y\nn\n"))
    assert main(["up", "--next-zone"], site.env) == ExitCode.NO_CAPACITY
    err = capsys.readouterr().err
    assert "Delete these machines and build in us-central1-b? [y/N]" in err
    assert "no c3-highmem-8 is free in us-central1-f" in err.splitlines()[-1]
    assert "tried" not in err.splitlines()[-1]
    assert not [each for each in words(site) if each.startswith("config set")]


def test_next_zone_ends_machines_once_and_then_asks_no_more(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.build()
    site.configure(cluster="mine", project=PROJECT, zones=[f"us-central1-{zone}" for zone in "fcb"])
    own_key(site)
    site.pulumi.machines("mine-0", "mine-1")
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out="done\n")
    site.pulumi.on("up", out=PLAIN, status=255, times=2)
    # The head's machine is gone, so it is not queried for a run.
    site.cloud.drop("instances", "mine-0")
    monkeypatch.setattr("sys.stdin", Answers("y\ny\n"))
    assert main(["up", "--next-zone"], site.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert err.count("this deletes 2 machine(s)") == 1 and err.count("[y/N]") == 2
    assert words(site).count("up --yes --skip-preview") == 3


ZONES = [f"us-central1-{zone}" for zone in "fcb"]


def full(zone: str, *, hours: float) -> dict[str, object]:
    """Return a zone that was full this number of hours ago."""
    reason = "no c3-highmem-8 free"
    return {"zone": zone, "time_unix": time.time() - hours * 3600, "reason": reason}


def write_full_zones(site: Site, text: str) -> None:
    path = site.folder / ".cluster" / "mine" / "zones.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def firsts(site: Site) -> list[str]:
    """Return the zones that were moved to the front of the config, in order."""
    begin = "config set --path zones[0] "
    return [each.removeprefix(begin) for each in words(site) if each.startswith(begin)]


def test_next_zone_remembers_which_zones_were_full(site: Site, capsys: Capture) -> None:
    site.build()
    site.configure(cluster="mine", project=PROJECT, zones=ZONES)
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out=PLAIN, status=255)
    up = ["up", "--yes", "--next-zone", "--keep-on-failure"]
    assert main(up, site.env) == ExitCode.NO_CAPACITY
    kept = json.loads((site.folder / ".cluster" / "mine" / "zones.json").read_text())
    assert [each["zone"] for each in kept["zones"]] == ZONES
    assert all(
        "free" in each["reason"] and each["time_unix"] <= time.time() for each in kept["zones"]
    )
    # All were full, so the config's order is used.
    before = words(site).count("up --yes --skip-preview")
    capsys.readouterr()
    assert main(up, site.env) == ExitCode.NO_CAPACITY
    assert words(site).count("up --yes --skip-preview") == before + 3
    assert "full within" not in capsys.readouterr().err


def test_a_zone_that_was_full_is_passed_over_for_hours_and_that_is_one_line(
    site: Site, capsys: Capture
) -> None:
    site.build()
    site.configure(cluster="mine", project=PROJECT, zones=ZONES)
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out="done\n")
    # c was full too long ago to matter.
    past = [full(ZONES[0], hours=2), full(ZONES[1], hours=7)]
    write_full_zones(site, json.dumps({"schema_version": 1, "zones": past}))
    assert main(["up", "--yes", "--next-zone"], site.env) == ExitCode.OK
    assert firsts(site) == [ZONES[1]]
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "full within" in each]
    assert line == (
        f"--next-zone: building in {ZONES[1]}; skipping zones that were full within the last 6 h: "
        f"{ZONES[0]} (no c3-highmem-8 free, 2.0 h ago)"
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema_version": 1, "zones": [{"zone": "../x"}]}']
)
def test_a_damaged_memory_of_zones_is_none(site: Site, text: str, capsys: Capture) -> None:
    site.build()
    site.configure(cluster="mine", project=PROJECT, zones=ZONES)
    site.pulumi.on("preview")
    site.pulumi.on("up", out="done\n")
    write_full_zones(site, text)
    assert main(["up", "--yes", "--next-zone"], site.env) == ExitCode.OK
    assert firsts(site) == []


def test_without_next_zone_a_full_zone_is_tried_again(site: Site, capsys: Capture) -> None:
    site.build()
    site.configure(cluster="mine", project=PROJECT, zones=ZONES)
    site.pulumi.on("preview")
    site.pulumi.on("up", out="done\n")
    write_full_zones(site, json.dumps({"schema_version": 1, "zones": [full(ZONES[0], hours=1)]}))
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    assert firsts(site) == [] and "full within" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("refusal", "spot", "reason"),
    [
        (NOT_OFFERED, "false", "no c3-highmem-8 offered"),
        (PREEMPTED, "true", "preempted spot machines"),
    ],
)
def test_next_zone_goes_on_where_a_zone_lacks_the_type_or_takes_a_spot_machine_back(
    site: Site, capsys: Capture, refusal: str, spot: str, reason: str
) -> None:
    site.build()
    site.configure(cluster="mine", project=PROJECT, zones=ZONES, spot=spot, bucket="create")
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out="done\n")
    site.pulumi.on("up", out=refusal, status=255, times=2)
    assert main(["up", "--yes", "--next-zone"], site.env) == ExitCode.OK
    assert words(site).count("up --yes --skip-preview") == 3
    # The zone that worked is first; the others keep their order.
    assert firsts(site) == [ZONES[1], ZONES[2]]
    kept = json.loads((site.folder / ".cluster" / "mine" / "zones.json").read_text())
    assert [(each["zone"], each["reason"]) for each in kept["zones"]] == [
        (zone, reason) for zone in ZONES[:2]
    ]


@pytest.mark.parametrize(
    ("refusal", "code"),
    [(NOT_OFFERED, ExitCode.CONFIG), (PREEMPTED, ExitCode.NO_CAPACITY)],
)
def test_zones_that_failed_stay_where_they_were_in_the_config(
    site: Site, capsys: Capture, refusal: str, code: ExitCode
) -> None:
    site.configure(cluster="mine", project=PROJECT, zones=ZONES, spot="true", bucket="create")
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out=refusal, status=255)
    assert main(["up", "--yes", "--next-zone"], site.env) == code
    assert firsts(site) == [ZONES[1], ZONES[2], ZONES[0]]
    asked = [each for each in words(site) if each.startswith("config set")]
    assert asked[-3:] == [f"config set --path zones[{at}] {z}" for at, z in enumerate(ZONES)]
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"Tried zones of the config: {', '.join(ZONES)}" in last


def test_a_zone_with_a_machine_in_it_stays_first_in_the_config(site: Site, capsys: Capture) -> None:
    site.configure(cluster="mine", project=PROJECT, zones=ZONES)
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out="error: googleapi: Error 500: backendError", status=255)
    site.pulumi.on("up", out=NOT_OFFERED, status=255, times=1)
    # No machine exists at the start, and one at the end.
    site.pulumi.machines("mine-0")
    site.pulumi.on("stack", "export", out=json.dumps({"version": 3, "deployment": {}}), times=2)
    up = ["up", "--yes", "--next-zone", "--keep-on-failure"]
    assert main(up, site.env) == ExitCode.PREFLIGHT
    assert firsts(site) == [ZONES[1]]


def test_an_interrupt_leaves_the_zones_in_the_configs_order(site: Site, capsys: Capture) -> None:
    site.configure(cluster="mine", project=PROJECT, zones=ZONES)
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.replay("up-interrupted", status=1)
    site.pulumi.on("up", out=NOT_OFFERED, status=255, times=1)
    assert main(["up", "--yes", "--next-zone"], site.env) == INTERRUPTED
    assert firsts(site) == [ZONES[1], ZONES[0]]
