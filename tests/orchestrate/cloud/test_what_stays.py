"""`up` on a running cluster: kept resources, reports, and confirmations."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.cluster_records import ClusterRecord
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.machine_status import remove_machines
from payload.orchestrate.clouds.pulumi.reused_bucket import use_kept_bucket
from payload.orchestrate.clouds.pulumi.stack_state import StackState
from payload.orchestrate.terminal.console import text_console
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.fake_pulumi import step
from tests.orchestrate.cloud.stacks import Answers, Capture, destroys, head_says, own_key, words
from tests.orchestrate.cloud.standin import NUMBER, PROJECT, REGION, ZONE
from tests.orchestrate.cloud.test_failures import DETAILS, PLAIN
from tests.support.identities import CLUSTER, cluster_labels

pytestmark = pytest.mark.processes

ZONES = [f"{REGION}-f", f"{REGION}-b"]
_URN = "urn:pulumi:dev::tileforge::gcp:{kind}::{name}"
MACHINE = _URN.format(kind="compute/instance:Instance", name="mine-0")
FILESTORE = _URN.format(kind="filestore/instance:Instance", name="mine-shared")
NETWORK = _URN.format(kind="compute/network:Network", name="mine-network")
BUCKET = _URN.format(kind="storage/bucket:Bucket", name="mine-results")
PLACE = f"projects/{PROJECT}/zones/{ZONE}/instances/"
KEPT = cluster_labels("mine") | {"tileforge-kept": "true"}


def state_has(site: Site, *urns: str, looks: int = -1) -> None:
    """Set the stack's state to these, for a number of reads or permanently."""
    inputs = {"name": "mine-shared", "location": ZONE, "fileShares": {"capacityGb": 1024}}
    resources = [
        {
            "urn": urn,
            "id": f"{'' if urn == BUCKET else PLACE}{urn.rpartition('::')[2]}",
            "type": urn.split("::")[2],
            "inputs": inputs if urn == FILESTORE else {},
        }
        for urn in urns
    ]
    state = {"version": 3, "deployment": {"resources": resources}}
    site.pulumi.on("stack", "export", out=json.dumps(state), times=looks)


def filestore_step(op: str, *, zone: str = ZONE) -> str:
    new = {"inputs": {"name": "mine-shared", "location": zone}}
    return step(op, FILESTORE, new=None if op == "delete" else new)


@pytest.mark.parametrize("op", ["delete", "replace"])
def test_a_filestore_instance_goes_only_after_its_name_was_typed(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    site.build()
    site.pulumi.on("preview", events=filestore_step(op))
    site.pulumi.on("up", out="done\n")
    state_has(site, NETWORK, FILESTORE)
    # Neither --yes nor another instance's name confirms it.
    other = ["--delete-filestore", "ours-shared"]
    assert main(["up", "--yes", *other], site.env) == ExitCode.USAGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert "so nothing was built. Copy the data if you need it, then repeat" in last
    assert last.endswith("with --delete-filestore mine-shared")
    monkeypatch.setattr("sys.stdin", Answers("yes\n"))
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert "This deletes Filestore mine-shared with all data on it." in err
    assert "nothing was built" in err and "up --yes --skip-preview" not in words(site)
    monkeypatch.setattr("sys.stdin", Answers("mine-shared\n"))
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    assert words(site).count("up --yes --skip-preview") == 1
    monkeypatch.undo()
    monkeypatch.chdir(site.folder)
    assert main(["up", "--yes", "--delete-filestore", "mine-shared"], site.env) == ExitCode.OK


def test_machines_in_another_zone_than_filestore_are_named(site: Site, capsys: Capture) -> None:
    site.build()
    site.pulumi.on("preview", events=filestore_step("same", zone=f"{REGION}-f"))
    site.pulumi.on("up", events=filestore_step("same", zone=f"{REGION}-f"))
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert f"Filestore mine-shared is in {REGION}-f, but the machines are in" in err
    assert f"the machines are in {ZONE}: Google bills traffic" in err


def test_another_region_than_filestores_is_refused(site: Site, capsys: Capture) -> None:
    site.build()
    site.configure(cluster="mine", project=PROJECT, region="europe-west4")
    site.pulumi.on("preview", events=filestore_step("same"))
    assert main(["up", "--yes"], site.env) == ExitCode.CONFIG
    assert f"Filestore mine-shared is in {ZONE} with all data" in capsys.readouterr().err
    assert "up --yes --skip-preview" not in words(site)


@pytest.mark.parametrize("machines", [(), (MACHINE,)])
def test_after_a_stock_out_the_last_line_has_filestores_price(
    site: Site, capsys: Capture, machines: tuple[str, ...]
) -> None:
    own_key(site)
    site.pulumi.on("preview")
    site.pulumi.on("up", out=DETAILS, status=255)
    state_has(site, NETWORK, FILESTORE, *machines)
    assert main(["up", "--yes"], site.env) == ExitCode.NO_CAPACITY
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"Filestore mine-shared in {ZONE} has no lifetime limit and is billed at $0.35/h until it "
        "is removed" in last
    )
    assert ("No machine was built" in last) == (not machines)


def test_an_up_that_fails_takes_its_machines_back_and_leaves_the_data(
    site: Site, capsys: Capture
) -> None:
    """All spot machines were preempted, and one of two is rebuilt: data on Filestore is kept."""
    site.build(nodes=1)
    site.cloud.add_filestore("mine-shared", labels={}, network="mine-network")
    site.pulumi.on("preview")
    site.pulumi.on("up", out=DETAILS, status=255)
    state_has(site, NETWORK, FILESTORE, MACHINE)
    # Before the preview and after the confirmation there is no machine.
    state_has(site, NETWORK, FILESTORE, looks=2)
    assert main(["up", "--yes"], site.env) == ExitCode.NO_CAPACITY
    last = capsys.readouterr().err.splitlines()[-1]
    assert "The new machines were removed. Filestore mine-shared" in last
    assert site.cloud.items["instances", ZONE] == [] and len(site.cloud.filestores) == 1
    assert not [each for each in words(site) if each.startswith("destroy")]


def test_a_filestore_instance_that_the_stack_does_not_know_is_not_removed_unasked(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.build()
    site.cloud.add_filestore("mine-shared", labels=cluster_labels("mine"), network="mine-network")
    site.pulumi.on("preview")
    site.pulumi.on("up", out="error: googleapi: Error 409: it already exists", status=255)
    state_has(site, NETWORK)
    assert main(["up", "--yes", "--keep-on-failure"], site.env) == ExitCode.USAGE
    assert "This deletes Filestore mine-shared" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Answers("no\n"))
    assert main(["up", "--yes", "--keep-on-failure"], site.env) == ExitCode.CONFIG
    assert len(site.cloud.filestores) == 1 and site.cloud.items["instances", ZONE] != []


def instance(site: Site, name: str) -> dict[str, Any]:
    (found,) = [each for each in site.cloud.items["instances", ZONE] if each["name"] == name]
    return found


def add_by_hand(site: Site, name: str, *, goes_too: bool) -> None:
    """Attach a disk, and add a label, metadata and a tag."""
    url = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{ZONE}/disks/big"
    machine = instance(site, name)
    boot = {"boot": True, "autoDelete": True, "source": url.replace("big", name)}
    machine["disks"] = [boot, {"source": url, "autoDelete": goes_too, "type": "PERSISTENT"}]
    machine["labels"] = {**machine["labels"], "team": "nlp", "owner": "ada"}
    machine["metadata"] = {
        "items": [{"key": key, "value": "x"} for key in ("user-data", "startup-script", "ssh-keys")]
    }
    machine["tags"] = {"items": ["web"]}


ADDED = "disk big, label team, metadata ssh-keys, metadata startup-script, tag web"


def test_what_people_have_added_is_reported_and_the_program_told_to_leave_it(
    site: Site, capsys: Capture
) -> None:
    site.build()
    own_key(site)
    site.configure(cluster="mine", project=PROJECT, zones=[ZONE], labels=["owner=ada"])
    site.pulumi.machines("mine-0", "mine-1")
    add_by_hand(site, "mine-0", goes_too=True)
    seen = site.folder / "seen"
    program = (site.pulumi.bin / "pulumi").read_text()
    told = f'open({str(seen)!r}, "a").write(os.environ.get("TILEFORGE_METADATA_KEPT", "") + "\\n")'
    (site.pulumi.bin / "pulumi").write_text(
        f"{program}".replace("events = None", told + "\nevents = None")
    )
    site.pulumi.on("up", out="done\n")
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    err = capsys.readouterr().err
    (line,) = [each for each in err.splitlines() if "added by hand" in each]
    assert line == f"mine-0: added by hand, kept: {ADDED}"
    # Both the preview and `up` itself.
    assert seen.read_text().split().count("ssh-keys,startup-script") >= 2


def test_a_disk_that_google_would_delete_with_its_machine_stops_up(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.build()
    own_key(site)
    head_says(monkeypatch)
    site.configure(cluster="mine", project=PROJECT, zones=[ZONE], labels=["owner=ada"])
    site.pulumi.machines("mine-0", "mine-1", going=["mine-0"])
    site.pulumi.on("up", out="done\n")
    add_by_hand(site, "mine-0", goes_too=True)
    assert main(["up", "--yes"], site.env) == ExitCode.CONFIG
    last = capsys.readouterr().err.splitlines()[-1]
    assert "replacing the machine would delete disk big, which was attached by hand" in last
    assert f"set-disk-auto-delete mine-0 --zone={ZONE} --disk=big --no-auto-delete" in last
    assert "up --yes --skip-preview" not in words(site)
    add_by_hand(site, "mine-0", goes_too=False)
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert f"lost because the machine is replaced: {ADDED}; disks are detached and kept" in err


API = "https://www.googleapis.com/compute/beta/"
IMAGE, SUBNET = "projects/u/global/images/v1", f"projects/{PROJECT}/regions/{REGION}/subnetworks/s"


def machine_inputs(*, url: str = "", **more: Any) -> dict[str, Any]:
    return {
        "bootDisk": {"initializeParams": {"image": f"{url}{IMAGE}", "size": 100}},
        "networkInterfaces": [{"subnetwork": f"{url}{SUBNET}", "nicType": "GVNIC"}],
        "machineType": "c3-highmem-8",
        "zone": ZONE,
        "scheduling": {"provisioningModel": "SPOT", "maxRunDuration": {"seconds": 43_200}},
        "metadata": {"user-data": "x" * 100},
        **more,
    }


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (
            machine_inputs(machineType="c3-highmem-22", metadata={"user-data": "y" * 100}),
            "replaced, because of changes to machineType (c3-highmem-8 to c3-highmem-22), its "
            "user-data",
        ),
        (
            machine_inputs(zone=f"{REGION}-b"),
            f"replaced, because of changes to zones ({ZONE} to {REGION}-b)",
        ),
        (machine_inputs(), "replaced, because of changes to the cluster program"),
        (
            machine_inputs(networkInterfaces=[{"subnetwork": f"{SUBNET}-1460"}]),
            "replaced, because of changes to its network",
        ),
        (None, "removed"),
    ],
)
def test_up_names_each_machine_that_ends_and_why(
    site: Site, capsys: Capture, new: dict[str, Any] | None, said: str
) -> None:
    site.build()
    own_key(site)
    site.pulumi.machines("mine-0")
    # As with a real engine: a refresh adds URLs and lists of defaults to the old inputs.
    old = {"inputs": machine_inputs(url=API, __defaults=["eraseWindowsVssSignature"])}
    if new is None:
        site.pulumi.on("preview", events=step("delete", MACHINE, old=old))
    else:
        events = [step("delete-replaced", MACHINE, old=old)]
        events.append(step("replace", MACHINE, old=old, new={"inputs": new}))
        site.pulumi.on("preview", events="".join(events))
    assert main(["up", "--dry-run", "--without-collect"], site.env) == ExitCode.OK
    assert f"mine-0: {said}\n" in capsys.readouterr().err


@pytest.mark.parametrize("next_zone", [False, True])
def test_spot_auto_ends_with_on_demand_machines(
    site: Site, capsys: Capture, next_zone: bool
) -> None:
    site.build()
    site.configure(cluster="mine", project=PROJECT, zones=ZONES, spot="auto", bucket="create")
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out="done\n")
    site.pulumi.on("up", out=PLAIN, status=255, times=len(ZONES) if next_zone else 1)
    more = ["--next-zone"] if next_zone else []
    assert main(["up", "--yes", *more], site.env) == ExitCode.OK
    done = [each for each in words(site) if each.startswith(("up", "config set"))]
    back = [f"config set --path zones[{place}] {zone}" for place, zone in enumerate(ZONES)]
    moves = [f"config set --path zones[{n}] {zone}" for n, zone in enumerate(reversed(ZONES))]
    attempt = "up --yes --skip-preview"
    assert done == (
        [attempt, *moves, attempt, "config set spot false", *back, attempt]
        if next_zone
        else [attempt, "config set spot false", attempt]
    )
    assert (
        "no spot machine is free, so the stack's config now has spot false"
        in capsys.readouterr().err
    )
    if next_zone:
        # Zones without spot machines can have on-demand machines.
        kept = json.loads((site.folder / ".cluster" / "mine" / "zones.json").read_text())
        assert kept["zones"] == []


def test_spot_auto_falls_back_once(site: Site, capsys: Capture) -> None:
    site.configure(cluster="mine", project=PROJECT, zones=ZONES, spot="auto", bucket="create")
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out=PLAIN, status=255)
    assert main(["up", "--yes"], site.env) == ExitCode.NO_CAPACITY
    assert words(site).count("up --yes --skip-preview") == 2
    assert "Spot machines were requested" not in capsys.readouterr().err.splitlines()[-1]


def sets(site: Site) -> list[str]:
    return [each for each in words(site) if each.startswith("config set")]


def test_the_next_up_uses_the_bucket_that_the_cluster_had(site: Site, capsys: Capture) -> None:
    site.build()
    site.configure(cluster="mine", project=PROJECT, zones=[ZONE], bucket="create")
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out="done\n")
    site.cloud.buckets[0]["labels"] = KEPT
    # While the stack has its bucket, the config is unchanged.
    state_has(site, NETWORK, BUCKET)
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    state_has(site, NETWORK)
    assert main(["up", "--dry-run"], site.env) == ExitCode.OK
    assert sets(site) == []
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    assert "reusing gs://mine-results from this cluster's earlier build" in (
        capsys.readouterr().err
    )
    assert sets(site) == ["config set bucket mine-results"]


WITHOUT_IDENTITY = {"tileforge-cluster": "mine", "tileforge-kept": "true"}


def had_bucket(site: Site) -> None:
    """Record a bucket that `bucket: create` created."""
    known = ClusterRecord(
        cluster="mine", project=PROJECT, region=REGION, node_usd={}, bucket="mine-results"
    )
    record = {"schema_version": 1, **asdict(known)}
    (site.folder / ".cluster" / "mine" / "stack.json").write_text(json.dumps(record))
    site.pulumi.on("config", "set")


@pytest.mark.parametrize(
    ("labels", "number", "is_ours"),
    [
        (KEPT, NUMBER, True),
        ({}, NUMBER, False),
        (KEPT | {"tileforge-cluster": "other"}, NUMBER, False),
        (WITHOUT_IDENTITY, NUMBER, False),
        (KEPT, "666", False),
        (None, "", False),
    ],
)
def test_what_has_taken_the_name_of_a_bucket_is_not_used(
    site: Site, labels: dict[str, str] | None, number: str, is_ours: bool, capsys: Capture
) -> None:
    """Attack: results go to another user's bucket with our bucket's name and labels."""
    had_bucket(site)
    if labels is not None:
        site.cloud.add_bucket("mine-results", labels=labels, number=number)
    for setting in ("create", "mine-results"):
        use_kept_bucket(
            Pulumi(site.env, folder=site.folder),
            {"project": PROJECT, "bucket": setting},
            "mine",
            StackState(machines=(), parts=()),
            site.google,
            identity=CLUSTER,
            folder=site.folder,
            dry_run=False,
            talk=text_console(stderr=True),
        )
    wanted = "mine-results" if is_ours else "create"
    assert sets(site) == [f"config set bucket {wanted}"]
    said = "gs://mine-results is gone: creating a new results bucket" in capsys.readouterr().err
    assert said is not is_ours


def test_down_forgets_the_bucket_that_it_deletes(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.build()
    had_bucket(site)
    site.cloud.buckets[0]["labels"] = KEPT
    site.configure(cluster="mine", project=PROJECT, zones=[ZONE], bucket="mine-results")
    head_says(monkeypatch)
    destroys(site)
    monkeypatch.setattr("sys.stdin", Answers("mine-results\n"))
    down = ["down", "--yes", "--delete-bucket", "mine-results"]
    assert main(down, site.env) == ExitCode.OK, capsys.readouterr().err
    assert site.cloud.buckets == [] and sets(site) == ["config set bucket create"]
    kept = json.loads((site.folder / ".cluster" / "mine" / "stack.json").read_text())
    assert kept["bucket"] is None


def test_a_bucket_that_the_config_names_is_the_operators_choice(site: Site) -> None:
    """A bucket that `create` did not create is not recorded, and never replaced in the config."""
    site.build()
    site.configure(cluster="mine", project=PROJECT, zones=[ZONE], bucket="mine-results")
    site.pulumi.on("preview")
    site.pulumi.on("up", out="done\n")
    site.cloud.buckets[0]["labels"] = {}
    for _ in range(2):
        assert main(["up", "--yes"], site.env) == ExitCode.OK
    assert sets(site) == []


@pytest.mark.parametrize("place", [PLACE, PLACE.replace(PROJECT, "old-lab")])
def test_only_the_stacks_own_machines_are_taken_back(site: Site, place: str) -> None:
    site.cloud.add_node("mine-0", labels={})
    state = StackState(machines=("mine-0",), parts=((MACHINE, f"{place}mine-0"),))
    remove_machines(site.google(), state)
    left = [each["name"] for each in site.cloud.items["instances", ZONE]]
    assert left == ([] if place == PLACE else ["mine-0"])
