"""Stopped machines: `up`, `down` and `doctor` report them, and `up` and `down` start them."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from payload.core.errors import ExitCode, HostKeyError, SshUnreachableError
from payload.machines.inventory import Access, ClusterInventory, Node
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.head_address import update_head_address
from payload.orchestrate.clouds.gcp.machine_start import start
from payload.orchestrate.clouds.gcp.stopped_machines import StoppedMachine, stopped_machines
from payload.orchestrate.clouds.pulumi.stack_outputs import StackOutputs
from payload.orchestrate.commands import head_runs, results_at_stake
from payload.orchestrate.commands.head_runs import Head
from payload.orchestrate.runs.mirror import read_mirrored, write_mirrored
from payload.orchestrate.sites.ssh_run import remote_run
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import RunPaths
from payload.stack.operator_key_file import make_operator_key
from tests.orchestrate.cloud.conftest import Site, inventory_output
from tests.orchestrate.cloud.stacks import (
    Answers,
    Capture,
    copy_of_run,
    destroys,
    head_says,
    own_key,
    words,
)
from tests.orchestrate.cloud.standin import PROJECT, ZONE, Fault
from tests.orchestrate.cloud.standin_compute import BASE, Document
from tests.support.identities import cluster_labels

pytestmark = pytest.mark.processes
PLACE = f"projects/{PROJECT}/zones/{ZONE}"
MAINTENANCE = "compute.instances.terminateOnHostMaintenance"
URN = (
    "urn:pulumi:dev::tileforge::tileforge:infra:ClusterNodes$gcp:compute/instance:Instance::mine-0"
)


def machine(site: Site, name: str) -> Document:
    """Return Google's document of a machine."""
    return next(each for each in site.cloud.items["instances", ZONE] if each["name"] == name)


def stopped(site: Site, name: str, kind: str, *, status: str = "TERMINATED") -> None:
    """Stop a machine by an operation of this type, without a request."""
    machine(site, name)["status"] = status
    site.cloud.add(
        "operations",
        f"operation-{kind}-{name}",
        place=ZONE,
        labels={},
        operationType=kind,
        targetLink=f"{BASE}/{PROJECT}/zones/{ZONE}/instances/{name}",
        insertTime="2026-11-22T08:00:00.000-08:00",
        user="ada@example.com" if kind == "stop" else "system",
        status="DONE",
    )


def cluster(site: Site) -> None:
    """Create a cluster that is up, in Pulumi's state and in the cloud."""
    site.build()
    own_key(site)
    site.pulumi.machines("mine-0", "mine-1", "mine-2", place=PLACE)
    site.pulumi.on("up")


def answer(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", Answers("".join(f"{line}\n" for line in lines)))


def test_up_starts_what_google_stopped_and_leaves_what_a_person_stopped(
    site: Site, capsys: Capture
) -> None:
    cluster(site)
    stopped(site, "mine-0", MAINTENANCE)
    stopped(site, "mine-1", "stop")
    assert main(["up", "--dry-run"], site.env) == ExitCode.OK
    assert machine(site, "mine-0")["status"] == "TERMINATED"
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert "machine mine-0 is TERMINATED (Google's host maintenance stopped it, 2026-11-22" in err
    assert "machine mine-1 is TERMINATED (ada@example.com stopped it, 2026-11-22" in err
    assert "lifetime limit is paused until the machine is started" in err
    assert "mine-0: started" in err and "mine-1 stays stopped" in err
    assert machine(site, "mine-0")["status"] == "RUNNING"
    assert machine(site, "mine-1")["status"] == "TERMINATED"
    # The user confirms.
    assert main(["up", "--yes", "--stopped", "start"], site.env) == ExitCode.OK
    assert machine(site, "mine-1")["status"] == "RUNNING"
    assert site.cloud.count("^DELETE") == 0


def test_up_resumes_a_suspended_machine(site: Site) -> None:
    cluster(site)
    stopped(site, "mine-2", "suspend", status="SUSPENDED")
    assert main(["up", "--yes", "--stopped", "start"], site.env) == ExitCode.OK
    assert site.cloud.count("^POST .*/instances/mine-2/resume") == 1
    assert machine(site, "mine-2")["status"] == "RUNNING"


@pytest.mark.parametrize(
    ("answers", "status"), [(["y", "n"], "RUNNING"), (["n", "n", "n"], "TERMINATED")]
)
def test_up_asks_whether_a_stopped_machine_is_started(
    site: Site, monkeypatch: pytest.MonkeyPatch, answers: list[str], status: str
) -> None:
    cluster(site)
    stopped(site, "mine-0", MAINTENANCE)
    answer(monkeypatch, *answers)
    assert main(["up"], site.env) == ExitCode.OK
    assert machine(site, "mine-0")["status"] == status
    assert words(site) == ["preview"]


def test_a_stopped_machine_is_replaced_only_with_what_is_on_it_known_to_be_lost(
    site: Site, capsys: Capture
) -> None:
    cluster(site)
    stopped(site, "mine-0", MAINTENANCE)
    site.pulumi.machines("mine-0", "mine-1", "mine-2", going=["mine-0"], place=PLACE)
    replace = ["up", "--yes", "--stopped", "replace"]
    assert main(replace, site.env) == ExitCode.CONFIG
    err = capsys.readouterr().err
    assert "this deletes 1 machine(s) with all their data: mine-0" in err
    assert "cannot determine if a run is active, so nothing was built" in err
    assert "mine-0: the machine is TERMINATED, not running" in err
    assert words(site) == [f"preview --replace {URN}", "stack output --json"]
    assert main([*replace, "--without-collect"], site.env) == ExitCode.OK
    assert f"up --yes --skip-preview --replace {URN}" in words(site)
    assert site.cloud.count("/start") == 0


def test_a_machine_that_cannot_be_started_for_want_of_capacity_is_exit_12(
    site: Site, capsys: Capture
) -> None:
    cluster(site)
    stopped(site, "mine-0", MAINTENANCE)
    site.cloud.stocked_out.add(ZONE)
    assert main(["up", "--yes"], site.env) == ExitCode.NO_CAPACITY
    last = capsys.readouterr().err.splitlines()[-1]
    assert "mine-0 cannot be started: no machine of its type is free in us-central1-a" in last
    assert "Its disk is kept and billed" in last and "up --stopped replace" in last
    assert words(site) == []


def test_down_starts_the_head_to_collect_and_destroys_without_it_only_when_told(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(site)
    destroys(site)
    stopped(site, "mine-0", MAINTENANCE)
    answer(monkeypatch, "n")
    assert main(["down"], site.env) == ExitCode.CONFIG
    last = capsys.readouterr().err.splitlines()[-1]
    assert "mine-0 is TERMINATED" in last and "so nothing was destroyed" in last
    assert "down --without-collect" in last
    assert words(site) == ["stack output --json"]
    assert main(["down", "--dry-run"], site.env) == ExitCode.OK
    assert "mine-0 would be started first" in capsys.readouterr().err
    assert machine(site, "mine-0")["status"] == "TERMINATED"
    # It boots for a while, so it is polled; it is destroyed only after it responds.
    asked = []

    def ask(*_: object, retry_for_s: float = 0.0, **__: object) -> Head:
        asked.append((machine(site, "mine-0")["status"], retry_for_s))
        return Head()

    monkeypatch.setattr(results_at_stake, "query_head", ask)
    assert main(["down", "--yes"], site.env) == ExitCode.OK
    assert asked[0] == ("RUNNING", 300.0)
    assert site.cloud.items["instances", ZONE] == []


def test_down_without_collect_starts_nothing(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(site)
    destroys(site)
    stopped(site, "mine-0", MAINTENANCE)
    head_says(monkeypatch)
    assert main(["down", "--yes", "--without-collect"], site.env) == ExitCode.OK
    assert site.cloud.count("/start") == 0


def test_a_head_that_boots_is_asked_again_until_it_answers(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(site)
    destroys(site)
    stopped(site, "mine-0", MAINTENANCE)
    (site.folder / ".cluster" / "mine" / "host_keys.json").unlink(missing_ok=True)
    tries = []

    def runs(*_: object, **__: object) -> Head:
        tries.append(1)
        if len(tries) < 3:
            raise SshUnreachableError("mine-0: cannot be reached")
        return Head()

    monkeypatch.setattr("payload.orchestrate.ssh.cluster.Cluster.connect", lambda *_: None)
    monkeypatch.setattr("payload.orchestrate.ssh.remote_run_folders.runs_on", runs)
    monkeypatch.setattr(head_runs, "_RETRY_S", 0.0)
    assert main(["down", "--yes"], site.env) == ExitCode.OK
    assert len(tries) == 4  # three before the confirmation, one after it


def test_doctor_shows_a_stopped_machine_with_both_ways_on(site: Site, capsys: Capture) -> None:
    cluster(site)
    site.cloud.sells_everything = True
    stopped(site, "mine-1", MAINTENANCE)
    main(["doctor", "--json"], site.env)
    checks = {each["name"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    found = checks["machine mine-1"]
    assert found["outcome"] == "error" and found["found"].startswith("TERMINATED (Google's host")
    assert "payload.orchestrate up" in found["fix"] and "orchestrate down" in found["fix"]
    machine(site, "mine-1")["status"] = "RUNNING"
    main(["doctor", "--json"], site.env)
    checks = {each["name"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["machines"]["found"] == "3 checked, none stopped"


def test_preflight_names_the_commands_that_help(site: Site, capsys: Capture) -> None:
    cluster(site)
    stopped(site, "mine-0", MAINTENANCE)
    assert main(["preflight", "--inventory", "stack"], site.env) == ExitCode.RANK_LOST
    err = capsys.readouterr().err
    assert "mine-0: the machine is TERMINATED" in err and "is kept and billed" in err
    assert "Start the machine: " in err and "orchestrate up" in err and "orchestrate down" in err


def test_only_the_clusters_own_machines_are_looked_at(site: Site) -> None:
    cluster(site)
    site.cloud.add_node("other-0", labels={}, status="TERMINATED")
    google: Google = site.google()
    assert stopped_machines(google, {("mine-0", ZONE)}) == []
    stopped(site, "mine-0", "insert", status="STOPPING")
    (found,) = stopped_machines(google, {("mine-0", ZONE)})
    assert str(found) == "mine-0 is STOPPING" and not found.by_google


@pytest.mark.parametrize("alive", [True, False])
def test_status_of_a_run_that_cannot_be_reached_shows_the_stopped_machine(
    site: Site, capsys: Capture, alive: bool
) -> None:
    cluster(site)
    stopped(site, "mine-0", MAINTENANCE)
    make_operator_key(site.folder / "key")
    paths = copy_of_run(site, "one", alive=alive)
    was = ClusterInventory.load(paths.inventory)
    node = replace(was.head, name="mine-0", zone=ZONE)
    ours = replace(was, source="pulumi", project=PROJECT, nodes=(node,))
    paths.inventory.write_text(ours.to_json())
    shown = ["status", "one", "--runs-dir", str(paths.root.parent)]
    assert main(shown, site.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert "machine mine-0 is TERMINATED (Google's host maintenance stopped it" in err
    assert "orchestrate up" in err and "orchestrate down" in err
    # Collected results are not only on its disk.
    site.cloud.requests.clear()
    mirrored = read_mirrored(paths)
    assert mirrored is not None
    write_mirrored(paths, replace(mirrored, alive=False, collected=""))
    assert main(shown, site.env) == ExitCode.OK
    assert site.cloud.requests == []


def direct_copy(site: Site, *, address: str | None) -> RunPaths:
    """Create a copy of a live run with the head at this external address."""
    make_operator_key(site.folder / "key")
    paths = copy_of_run(site, "one", alive=True, instance_id=machine(site, "mine-0")["id"])
    was = ClusterInventory.load(paths.inventory)
    node = replace(was.head, name="mine-0", zone=ZONE, external_address=address)
    access = Access(kind="direct") if address else Access(kind="iap", project=PROJECT)
    now = replace(was, source="pulumi", project=PROJECT, nodes=(node,), access=access)
    paths.inventory.write_text(now.to_json())
    return paths


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("203.0.113.7", "203.0.113.99", "at 203.0.113.99, not at 203.0.113.7."),
        (None, "203.0.113.99", "at 203.0.113.99, not through Google's proxy."),
        ("203.0.113.7", None, "through Google's proxy, not at 203.0.113.7."),
    ],
)
def test_a_run_whose_head_is_reached_another_way_says_so_and_takes_it(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    before: str | None,
    now: str | None,
    said: str,
) -> None:
    """Simulate a stop and start by hand, or a new accessMode, with `up` in another folder."""
    cluster(site)
    dialled = []

    def dial(node: Node, **_: object) -> None:
        dialled.append(node.external_address)
        raise HostKeyError(
            f"{node.name}: another host key"
        )  # another user's machine has the address

    monkeypatch.setattr("payload.orchestrate.ssh.cluster.dial", dial)
    interfaces = [{"accessConfigs": [{"natIP": now}]}] if now else [{}]
    paths = direct_copy(site, address=before)
    unchanged = paths.inventory.read_text()
    shown = ["status", "one", "--runs-dir", str(paths.root.parent)]
    machine(site, "mine-0").update(networkInterfaces=interfaces, status="TERMINATED")
    assert main(shown, site.env) == ExitCode.OK
    assert "another host key" in capsys.readouterr().err
    assert paths.inventory.read_text() == unchanged
    machine(site, "mine-0")["status"] = "RUNNING"
    assert main(shown, site.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert f"mine-0: now reached {said}" in err and "the next attempt uses the new" in err
    assert main(shown, site.env) == ExitCode.OK
    assert "now reached" not in capsys.readouterr().err
    assert dialled == [before, before, now]
    kind = ClusterInventory.load(paths.inventory).access.kind
    assert kind == ("direct" if now else "iap")


def test_the_copy_of_a_run_on_another_machine_of_that_name_stays(site: Site) -> None:
    cluster(site)
    paths = direct_copy(site, address="203.0.113.7")
    interfaces = [{"accessConfigs": [{"natIP": "203.0.113.9"}]}]
    machine(site, "mine-0").update(networkInterfaces=interfaces, id="4711")
    assert update_head_address(paths, site.env) == ""
    assert ClusterInventory.load(paths.inventory).head.external_address == "203.0.113.7"


def test_a_retry_within_one_command_takes_the_new_address(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(site)
    dialled = []

    def dial(node: Node, **_: object) -> None:
        dialled.append(node.external_address)
        raise SshUnreachableError(f"{node.name}: no answer")

    monkeypatch.setattr("payload.orchestrate.ssh.cluster.dial", dial)
    paths = direct_copy(site, address="203.0.113.7")
    machine(site, "mine-0")["networkInterfaces"] = [{"accessConfigs": [{"natIP": "203.0.113.9"}]}]
    mirrored = read_mirrored(paths)
    assert mirrored is not None
    run = remote_run(paths, mirrored, env=site.env)
    for _ in range(2):
        with pytest.raises(SshUnreachableError):
            run.update()
        run.close()
    assert dialled == ["203.0.113.7", "203.0.113.9"]


def test_a_started_head_has_another_address_and_the_copies_of_its_runs_get_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(site)
    destroys(site)
    stopped(site, "mine-0", MAINTENANCE)
    inventory = inventory_output("mine", ["mine-0"], access={"kind": "direct"})
    inventory["nodes"][0]["external_address"] = "203.0.113.7"
    site.pulumi.outputs(
        inventory=inventory,
        project=PROJECT,
        region="us-central1",
    )
    interfaces = [{"accessConfigs": [{"natIP": "203.0.113.99"}]}]
    machine(site, "mine-0")["networkInterfaces"] = interfaces
    ours, others = (
        copy_of_run(site, name, alive=False, collected="", instance_id=number)
        for name, number in (("one", "77"), ("two", "78"))
    )
    for paths in (ours, others):
        was = ClusterInventory.load(paths.inventory)
        node = replace(was.head, external_address="203.0.113.7")
        paths.inventory.write_text(replace(was, nodes=(node,)).to_json())
    asked = []

    def ask(outputs: StackOutputs, *_: object, **__: object) -> Head:
        asked.append(outputs.inventory.head.external_address)
        return Head(machine="77")

    monkeypatch.setattr(results_at_stake, "query_head", ask)
    assert main(["down", "--yes"], site.env) == ExitCode.OK
    assert asked[0] == "203.0.113.99"
    heads = [ClusterInventory.load(paths.inventory).head for paths in (ours, others)]
    assert [head.external_address for head in heads] == ["203.0.113.99", "203.0.113.7"]


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_machine_that_was_started_again_is_not_over_for_sweep(
    site: Site, capsys: Capture, is_refused: bool
) -> None:
    """Attack: its label expired, so `sweep --delete --yes` removes the running machine."""
    labels = cluster_labels("mine") | {"team": "nlp"}
    site.cloud.add_node(
        "mine-0",
        labels=labels,
        status="TERMINATED",
        labelFingerprint="AAAA",
        scheduling={"maxRunDuration": {"seconds": 3600}},
    )
    if is_refused:
        site.cloud.faults.append(Fault(path="/setLabels", method="POST", status=403))
    stopped_one = StoppedMachine(name="mine-0", zone=ZONE, status="TERMINATED")
    start(site.google(), [stopped_one], talk=text_console(stderr=True))
    assert ("the machine's expiry label was not updated" in capsys.readouterr().err) is is_refused
    now = machine(site, "mine-0")["labels"]
    left_s = int(now["tileforge-expires"]) - time.time()
    assert now == labels if is_refused else 3500 < left_s < 3601
    assert now | {"tileforge-expires": ""} == labels | {"tileforge-expires": ""}
    assert main(["sweep", "--project", PROJECT, "--delete", "--yes"], site.env) == ExitCode.OK
    assert "expires in 1 h" in capsys.readouterr().out and site.cloud.count("^DELETE") == 0


@pytest.mark.processes
def test_up_renews_the_label_of_a_machine_that_replaced_another_one(
    site: Site, capsys: Capture
) -> None:
    """Attack: Pulumi keeps the old label, so a new machine looks as if it was over in a minute."""
    site.build(nodes=2, expires_in_s=60)
    site.pulumi.on("preview")
    site.pulumi.on("up")
    began = datetime.now(UTC)
    for name, ran_s in (("mine-0", 43_200 - 60), ("mine-1", 5)):
        machine(site, name).update(
            scheduling={"maxRunDuration": {"seconds": 43_200}},
            lastStartTimestamp=(began - timedelta(seconds=ran_s)).isoformat(),
            labelFingerprint="AAAA",
        )
    before = machine(site, "mine-0")["labels"]
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    ends = began + timedelta(seconds=43_195)
    assert f"until {ends:%Y-%m-%d %H:%M} UTC" in capsys.readouterr().err
    assert machine(site, "mine-0")["labels"] == before
    label = machine(site, "mine-1")["labels"]["tileforge-expires"]
    assert ends.timestamp() - 5 <= int(label) <= time.time() + 43_200


@pytest.mark.parametrize(
    ("status", "ran_s", "limit_s", "is_over"),
    [
        ("RUNNING", 60, 3600, False),
        ("STAGING", 60, 3600, False),
        ("RUNNING", 7200, 3600, True),
        ("RUNNING", 60, 0, True),
        ("TERMINATED", 60, 3600, True),
    ],
)
def test_sweep_looks_at_the_end_that_google_keeps(
    site: Site, status: str, ran_s: int, limit_s: int, is_over: bool
) -> None:
    """Another user can have started it without updating the label."""
    site.cloud.add_node(
        "mine-0",
        labels=cluster_labels("mine"),
        status=status,
        lastStartTimestamp=datetime.fromtimestamp(time.time() - ran_s, UTC).isoformat(),
        scheduling={"maxRunDuration": {"seconds": limit_s}},
    )
    code = main(["sweep", "--project", PROJECT], site.env)
    assert code == (ExitCode.TEARDOWN if is_over else ExitCode.OK)
