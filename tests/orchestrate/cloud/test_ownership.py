"""Two clusters of one name in a project: neither removes or adopts the other's resources."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infra.gcp.labels import mark
from payload.core.errors import ConfigError, ExitCode
from payload.core.files import write_whole
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.cluster_records import cluster_folder, record_plan
from payload.orchestrate.clouds.gcp.host_keys import CACHE_FILE
from payload.orchestrate.clouds.gcp.machine_start import start_head
from payload.orchestrate.clouds.gcp.ownership import Ownership
from payload.orchestrate.clouds.gcp.removal_order import Resource
from payload.orchestrate.clouds.gcp.resource_kinds import DNS_ZONE, FILESTORE, SERVICE_ACCOUNT
from payload.orchestrate.clouds.pulumi.stack_outputs import recorded_outputs
from payload.orchestrate.clouds.pulumi.stack_state import StackState, ownership_of
from payload.orchestrate.terminal.console import text_console
from payload.stack.cluster_identity import known_cluster_identity, resolve_cluster_identity
from tests.orchestrate.cloud.conftest import Site, inventory_output
from tests.orchestrate.cloud.fake_pulumi import step
from tests.orchestrate.cloud.stacks import Answers, Capture, head_says, own_key, stay, words
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE
from tests.support.identities import ANOTHER_CLUSTER, CLUSTER, cluster_labels

pytestmark = pytest.mark.processes

URN = "urn:pulumi:dev::tileforge::gcp:compute/network:Network::mine-network"
NETWORK = "https://x/global/networks/mine-network"
THEIRS = cluster_labels("mine", ANOTHER_CLUSTER, expires=1_900_000_000)
OLDER = {key: value for key, value in THEIRS.items() if key != "tileforge-identity"}


def another_cluster(site: Site, labels: dict[str, str]) -> None:
    """Add another user's resources with our cluster's name to the project."""
    described: dict[str, Any] = {
        "labels": {},
        "description": mark({"tileforge-identity": "", **labels}),
    }
    if "tileforge-identity" not in labels:
        described["description"] = "tileforge-cluster=mine"
    site.cloud.add("networks", "mine-network", place="global", **described)
    site.cloud.add("routers", "mine-router", place=REGION, **described, network=NETWORK)
    site.cloud.add_node("mine-0", labels=labels)
    site.cloud.add("disks", "mine-0", place=ZONE, labels=labels)


@pytest.fixture
def shared(site: Site, request: pytest.FixtureRequest) -> Site:
    """Return a project with another cluster of our name, and a stack that plans to build one."""
    another_cluster(site, getattr(request, "param", THEIRS))
    site.pulumi.on("preview", events=step("create", URN))
    site.pulumi.on("up")
    site.pulumi.on("stack", "output", "--json", out="{}")
    own_key(site)
    return site


def at_terminal(monkeypatch: pytest.MonkeyPatch, answers: str) -> None:
    monkeypatch.setattr("sys.stdin", Answers(answers))


def state_lists(site: Site, **ids: str) -> None:
    """Set the stack's state to these resources: IDs by name."""
    kind = "gcp:compute/network:Network"
    resources = [
        {"urn": f"urn:pulumi:dev::tileforge::{kind}::{name}", "id": each}
        for name, each in ids.items()
    ]
    site.pulumi.on("stack", "export", out=json.dumps({"deployment": {"resources": resources}}))


def untouched(site: Site) -> bool:
    return site.cloud.count("^DELETE") == 0 and not {"up", "destroy"} & {
        each.split()[0] for each in words(site)
    }


@pytest.mark.parametrize(
    ("shared", "identity"),
    [(THEIRS, ANOTHER_CLUSTER), (OLDER, None)],
    indirect=["shared"],
)
@pytest.mark.parametrize("is_new_folder", [True, False])
def test_up_refuses_before_it_builds_anything(
    shared: Site, identity: str | None, is_new_folder: bool, capsys: Capture
) -> None:
    """Attack: `up --yes` treats the other cluster's resources as orphans and removes them."""
    if is_new_folder:
        (shared.folder / ".cluster" / "mine" / "identity.json").unlink()
    assert main(["up", "--yes"], shared.env) == ExitCode.CONFIG
    last = capsys.readouterr().err.splitlines()[-1]
    whose = f"of identity {identity}" if identity else "without an identity"
    assert f"{whose} since " in last and "instance mine-0" in last and "router mine-router" in last
    assert "pulumi config set cluster NAME" in last and "--take-over ID" in last
    assert untouched(shared)


@pytest.mark.parametrize("shared", [THEIRS, OLDER], indirect=True)
@pytest.mark.parametrize(
    "command",
    [
        ["down", "--yes"],
        ["sweep", "--cluster", "mine", "--project", PROJECT, "--delete", "--yes"],
    ],
)
@pytest.mark.parametrize("is_new_folder", [True, False])
def test_down_and_sweep_leave_the_other_cluster_alone(
    shared: Site,
    command: list[str],
    is_new_folder: bool,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attack: both commands remove it, with its head, without having built anything."""
    head_says(monkeypatch)
    shared.pulumi.on("destroy", out="destroyed\n")
    if is_new_folder:
        (shared.folder / ".cluster" / "mine" / "identity.json").unlink()
    code = main(command, shared.env)
    said = capsys.readouterr().err
    assert code == (ExitCode.TEARDOWN if is_new_folder else ExitCode.OK), said
    assert "instance mine-0" in said and "remove with" not in said
    assert ("--identity ID" in said) is is_new_folder
    assert shared.cloud.count("^DELETE") == 0


@pytest.mark.parametrize("shared", [THEIRS], indirect=True)
@pytest.mark.parametrize(
    ("identity", "typed", "code"),
    [
        (ANOTHER_CLUSTER, "y\nmine\n", ExitCode.OK),
        (ANOTHER_CLUSTER, "y\ny\n", ExitCode.OK),
        (CLUSTER, "y\nmine\n", ExitCode.CONFIG),
        ("none", "y\nmine\n", ExitCode.CONFIG),
    ],
)
def test_a_cluster_is_taken_over_by_its_identity_and_its_name(
    shared: Site,
    identity: str,
    typed: str,
    code: ExitCode,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_terminal(monkeypatch, typed)
    monkeypatch.setattr("payload.orchestrate.commands.up._finish", lambda *_, **__: ExitCode.OK)
    assert main(["up", "--take-over", identity], shared.env) == code, capsys.readouterr().err
    is_taken = identity == ANOTHER_CLUSTER and typed.endswith("mine\n")
    assert untouched(shared) is not is_taken
    assert shared.cloud.count("^DELETE") == (4 if is_taken else 0)


def test_yes_does_not_take_over(shared: Site, capsys: Capture) -> None:
    code = main(["up", "--yes", "--take-over", ANOTHER_CLUSTER], shared.env)
    assert code == ExitCode.USAGE
    assert "Answer this question at a terminal" in capsys.readouterr().err and untouched(shared)


@pytest.mark.parametrize(
    ("identity", "gone"), [(ANOTHER_CLUSTER, "mine-0"), ("none", "mine-older")]
)
def test_sweep_removes_one_identity_after_the_name_was_typed(
    shared: Site, identity: str, gone: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.cloud.add("addresses", "mine-older", place="global", labels=OLDER)
    shared.cloud.add("instances", "somebodys", place=ZONE, labels={}, network=NETWORK)
    words = ["sweep", "--cluster", "mine", "--project", PROJECT, "--identity", identity, "--delete"]
    assert main([*words, "--yes"], shared.env) == ExitCode.USAGE
    at_terminal(monkeypatch, "yes\n")
    assert main(words, shared.env) == ExitCode.TEARDOWN and shared.cloud.count("^DELETE") == 0
    at_terminal(monkeypatch, "mine\n")
    assert main(words, shared.env) == ExitCode.OK, capsys.readouterr().err
    left = {each["name"] for items in shared.cloud.items.values() for each in items}
    assert {"mine-0", "mine-older"} - left == {gone} and "somebodys" in left


@pytest.mark.parametrize("wrong", ["x", "0123", CLUSTER.upper(), "-1"])
def test_an_identity_that_is_none_is_refused(wrong: str, site: Site, capsys: Capture) -> None:
    words = ["sweep", "--cluster", "mine", "--project", PROJECT, f"--identity={wrong}"]
    assert main(words, site.env) == ExitCode.USAGE
    assert "16 hexadecimal digits" in capsys.readouterr().err


def test_a_strangers_machine_in_the_network_is_named_and_left(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: it is listed under "remove with", and `sweep --delete --yes` removes it."""
    head_says(monkeypatch)
    site.build()
    site.cloud.add(
        "instances",
        "database",
        place=ZONE,
        labels={},
        networkInterfaces=[{"network": NETWORK}],
    )
    words = ["sweep", "--cluster", "mine", "--project", PROJECT, "--delete", "--yes"]
    stay(site, "mine-network")
    assert main([*words, "--keep-buckets"], site.env) == ExitCode.TEARDOWN
    said = capsys.readouterr()
    assert "instance database" in said.err and "not this cluster's" in said.out
    assert [each["name"] for each in site.cloud.items["instances", ZONE]] == ["database"]


def test_what_the_state_lists_and_is_anothers_by_now_is_left_alone(
    shared: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our cluster was removed without Pulumi, and another user built with the same names."""
    head_says(monkeypatch)
    state_lists(shared, network=f"projects/{PROJECT}/global/networks/mine-network")
    for command in (["up", "--yes"], ["down", "--yes"]):
        assert main(command, shared.env) == ExitCode.CONFIG
        last = capsys.readouterr().err.splitlines()[-1]
        assert "lists resources of another cluster, so nothing was" in last
        assert "pulumi state" in last
    assert untouched(shared)


def test_the_state_is_the_proof_for_an_older_versions_cluster(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_says(monkeypatch)
    another_cluster(site, OLDER)
    (site.folder / ".cluster" / "mine" / "identity.json").unlink()
    state_lists(
        site,
        network=f"projects/{PROJECT}/global/networks/mine-network",
        node=f"projects/{PROJECT}/zones/{ZONE}/instances/mine-0",
    )
    site.pulumi.on("stack", "output", "--json", out="{}")
    site.pulumi.on("destroy", out="destroyed\n")
    assert main(["down", "--yes"], site.env) == ExitCode.OK
    left = [each["name"] for items in site.cloud.items.values() for each in items]
    assert left == ["mine-router"]  # the state does not list it
    assert "without an identity since" in capsys.readouterr().err


def test_an_identity_comes_back_from_the_state(shared: Site) -> None:
    """A fresh clone has no .cluster folder, and the same stack."""
    shutil.rmtree(shared.folder / ".cluster")
    own_key(shared)
    resource = {"urn": URN, "id": "x", "inputs": {"description": mark(THEIRS)}}
    document = {"deployment": {"resources": [resource]}}
    shared.pulumi.on("stack", "export", out=json.dumps(document))
    assert main(["up", "--dry-run"], shared.env) == ExitCode.OK
    assert known_cluster_identity(shared.folder, "mine") == ANOTHER_CLUSTER


def test_a_cluster_whose_folder_was_lost_owns_what_has_either_identity(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptions keep their first identity, and labels get the new one."""
    head_says(monkeypatch)
    another_cluster(site, THEIRS)
    described = {"urn": URN, "id": f"projects/{PROJECT}/global/networks/mine-network"}
    old = {**described, "inputs": {"description": mark(THEIRS)}}
    new = {"urn": f"{URN}-2", "id": "x", "inputs": {"labels": cluster_labels("mine")}}
    document = {"deployment": {"resources": [new, old]}}
    site.pulumi.on("stack", "export", out=json.dumps(document))
    site.pulumi.on("stack", "output", "--json", out="{}")
    site.pulumi.on("destroy", out="destroyed\n")
    assert main(["down", "--yes"], site.env) == ExitCode.OK, capsys.readouterr().err
    assert not any(site.cloud.items.values())


def test_a_folder_has_one_identity_of_a_cluster_and_one_stack(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: resolve_cluster_identity(tmp_path, "dev"), range(16)))
    assert len(set(made)) == 1 and known_cluster_identity(tmp_path, "dev") == made[0]
    assert resolve_cluster_identity(tmp_path, "dev", stack="a") == made[0]
    with pytest.raises(ConfigError, match="stack a builds a cluster with this name"):
        resolve_cluster_identity(tmp_path, "dev", stack="b")
    assert resolve_cluster_identity(tmp_path, "dev", stack="a", told=[CLUSTER]) == CLUSTER
    assert known_cluster_identity(tmp_path, "dev") == CLUSTER
    assert resolve_cluster_identity(tmp_path, "other", writes=False) != CLUSTER
    assert known_cluster_identity(tmp_path, "other") is None


@pytest.mark.parametrize("content", ["", "{", '{"schema_version": 1}', '{"identity": "x"}'])
def test_a_damaged_identity_is_never_replaced(content: str, tmp_path: Path) -> None:
    path = tmp_path / ".cluster" / "dev" / "identity.json"
    path.parent.mkdir(parents=True)
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="Restore the file"):
        resolve_cluster_identity(tmp_path, "dev")
    assert path.read_text(encoding="utf-8") == content


@pytest.mark.parametrize("labels", [THEIRS, {}])
def test_an_id_is_no_proof_for_what_has_another_identity(labels: dict[str, str]) -> None:
    disk = Resource(kind="disk", name="mine-0", location=ZONE, labels=labels)
    known = (f"projects/{PROJECT}/zones/{ZONE}/instances/mine-0",)
    state = Ownership(known=known, project=PROJECT)
    assert state.lists(disk) and state.owns(disk) is (labels == {})
    assert state.belies(disk) is (labels == THEIRS)
    elsewhere = Ownership(known=known, project="old-lab")
    assert not (elsewhere.lists(disk) or elsewhere.owns(disk) or elsewhere.belies(disk))


IDS = {
    "instance": "zones/{zone}/instances/x",
    "disk": "zones/{zone}/instances/x",
    "resource policy": "regions/{region}/resourcePolicies/x",
    "router": "regions/{region}/routers/x",
    "subnetwork": "regions/{region}/subnetworks/x",
    "firewall rule": "global/firewalls/x",
    "network": "global/networks/x",
    SERVICE_ACCOUNT: "serviceAccounts/x",
    DNS_ZONE: "managedZones/x",
    FILESTORE: "locations/{zone}/instances/x",
}


@pytest.mark.parametrize(("kind", "path"), IDS.items())
def test_an_id_is_proof_in_its_own_project_alone(kind: str, path: str) -> None:
    place = {"zone": ZONE, "region": REGION}
    found = next((word for word in place if f"{{{word}}}" in path), "")
    resource = Resource(kind=kind, name="x", location=place.get(found, "global"))
    known = f"projects/{PROJECT}/{path.format(**place)}"
    state = StackState(machines=(), parts=((URN, known),))
    assert state.projects == (PROJECT,)
    for project, is_proof in ((PROJECT, True), ("old-lab", False), (f"x/{PROJECT}", False)):
        assert ownership_of(state, project=project).owns(resource) is is_proof


def test_a_right_to_a_key_tells_nothing_of_the_stacks_project() -> None:
    key = "projects/keys/locations/global/keyRings/r/cryptoKeys/k/roles/x/member"
    assert StackState(machines=(), parts=((URN, key), (URN, "mine-results"))).projects == ()


@pytest.fixture
def moved(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a stack with a machine in old-lab, and a config with another project."""
    head_says(monkeypatch)
    own_key(site)
    site.cloud.add_node("mine-node-0", labels=OLDER, status="TERMINATED")
    site.cloud.add("disks", "mine-node-0", place=ZONE, labels=OLDER)
    site.cloud.empty_project = "old-lab"
    site.pulumi.machines("mine-node-0", place=f"projects/old-lab/zones/{ZONE}")
    site.pulumi.on("destroy", out="destroyed\n")
    site.pulumi.on("stack", "output", "--json", out="{}")
    site.pulumi.on("up")
    return site


@pytest.mark.parametrize("more", [[], ["--project", PROJECT]])
def test_down_leaves_what_has_the_name_in_another_project(
    moved: Site, more: list[str], capsys: Capture
) -> None:
    """Attack: a machine of the same name is treated as the state's machine and deleted."""
    assert main(["down", "--yes", *more], moved.env) == ExitCode.OK
    assert moved.cloud.count(f"^(POST|DELETE) .*/{PROJECT}/") == 0
    assert "0 resources of cluster mine left in project old-lab" in capsys.readouterr().err


def test_up_refuses_a_stack_of_another_project(moved: Site, capsys: Capture) -> None:
    """It would start or replace machines of the same names as its own."""
    for choice in ("start", "replace"):
        assert main(["up", "--yes", "--stopped", choice], moved.env) == ExitCode.CONFIG
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"project = '{PROJECT}': the stack has resources in project old-lab" in last
    assert "pulumi stack init NAME" in last and "orchestrate down" in last
    assert words(moved) == [] and moved.cloud.count("^(POST|DELETE)") == 0


def test_down_refuses_another_project_than_the_stacks(site: Site, capsys: Capture) -> None:
    site.build()
    assert main(["down", "--yes", "--project", "old-lab"], site.env) == ExitCode.CONFIG
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"--project old-lab: the stack's project is {PROJECT}" in last


def test_a_stopped_machine_of_others_is_not_started_in_the_heads_place(site: Site) -> None:
    """The state is damaged, and another user's machine has the name in the folder's record."""
    site.cloud.add_node("mine-0", labels=THEIRS, status="TERMINATED")
    text = json.dumps(inventory_output("mine", ["mine-0"]))
    inventory = ClusterInventory.from_json(text, where="x")
    own = Ownership(identities=frozenset((CLUSTER,)))
    talk = text_console(stderr=True)
    started = start_head(site.google(), inventory, own, dry_run=False, assume_yes=True, talk=talk)
    assert started is None and site.cloud.count("^POST") == 0


@pytest.mark.parametrize("project", [PROJECT, "old-lab"])
def test_nodes_that_were_reached_in_another_project_are_not_remembered(
    site: Site, project: str
) -> None:
    inventory = inventory_output("mine", ["mine-0"], project=project)
    folder = cluster_folder(site.folder, "mine")
    write_whole(folder / CACHE_FILE, json.dumps({"schema_version": 1, "inventory": inventory}))
    record_plan("mine", {"project": PROJECT}, folder=site.folder)
    found = recorded_outputs(site.folder, "mine", project=PROJECT)
    assert (found is not None) is (project == PROJECT)
