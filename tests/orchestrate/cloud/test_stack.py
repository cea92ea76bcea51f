"""A cluster from a Pulumi stack: its selection, its outputs, and its machines' host keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.core.errors import BootstrapError, ConfigError, ExitCode, NodesError, RankLostError
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.cluster_records import load_cluster_record
from payload.orchestrate.clouds.gcp.host_keys import pin_host_keys
from payload.orchestrate.clouds.pulumi.cli_errors import PulumiError
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.stack_config import cluster_name
from payload.orchestrate.clouds.pulumi.stack_outputs import read_outputs
from payload.orchestrate.inventories.chosen import load_cluster
from tests.orchestrate.cloud.conftest import KEY, Site, inventory_output, read_json
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE, Fault

pytestmark = pytest.mark.processes

ATTRIBUTES = "getGuestAttributes"


def pin(site: Site, *, deadline_s: float = 60.0, said: list[str] | None = None) -> ClusterInventory:
    return pin_host_keys(
        read_outputs(Pulumi(site.env, folder=site.folder)).inventory,
        site.google(retry_s=0.0),
        cache=site.folder / "host_keys.json",
        say=(said if said is not None else []).append,
        deadline_s=deadline_s,
        sleep=site.sleeps.append,
    )


def test_a_stack_is_a_cluster_with_host_keys(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.build()
    chosen = load_cluster("stack:dev", env=site.env)
    inventory = chosen.inventory
    assert [node.host_keys for node in inventory.nodes] == [(f"ssh-ed25519 {KEY}",)] * 3
    assert inventory.project == PROJECT
    assert all(node.instance_id for node in inventory.nodes)
    assert "--inventory stack:dev; $1.59/h until 2026-11-22 08:00 UTC" in chosen.headline()
    assert site.pulumi.calls() == [["dev", "stack", "output", "--json"]]
    assert capsys.readouterr().err.startswith("cluster mine (--inventory stack:dev)")
    known = load_cluster_record(site.folder, "mine")
    assert known is not None and (known.project, known.region) == (PROJECT, REGION)


def test_without_inventory_it_is_the_selected_stack(site: Site) -> None:
    site.build()
    chosen = load_cluster(None, env=site.env)
    assert chosen.inventory.cluster == "mine" and "the default" in chosen.why


@pytest.mark.parametrize(
    ("err", "why"),
    [
        ("error: no stack selected; please use `pulumi stack select`", "no Pulumi stack"),
        ("error: PULUMI_ACCESS_TOKEN must be set for login during", "Pulumi is not logged in"),
    ],
)
def test_without_a_stack_it_is_this_machine_and_the_reason_is_said(
    site: Site, err: str, why: str
) -> None:
    site.pulumi.on("stack", "output", err=err, status=255)
    chosen = load_cluster(None, env=site.env)
    assert chosen.inventory.access.kind == "local"
    assert f"this machine, the default: {why}" in chosen.headline()


def test_without_pulumi_or_outputs_it_is_this_machine(site: Site) -> None:
    assert "Pulumi is not installed" in load_cluster(None, env={"PATH": "/nowhere"}).why
    site.pulumi.outputs()
    assert "the selected stack has no cluster" in load_cluster(None, env=site.env).why
    (site.folder / "Pulumi.yaml").unlink()
    assert "no Pulumi project" in load_cluster(None, env=site.env).why


@pytest.mark.parametrize("name", ["Pulumi.yaml", "Pulumi.yml", "sub/Pulumi.json"])
def test_without_inventory_pulumi_is_not_started_in_another_project(
    site: Site, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.build()
    foreign = site.folder / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("name: tileforge\nruntime: python\nbackend:\n  url: https://evil.example\n")
    monkeypatch.chdir(foreign.parent)
    chosen = load_cluster(None, env=site.env)
    assert chosen.inventory.access.kind == "local"
    assert "belongs to another project; to use a stack" in chosen.headline()
    assert site.pulumi.calls() == []


def test_an_unknown_failure_is_no_reason_to_train_here(site: Site) -> None:
    site.pulumi.on("stack", "output", err="error: could not read the state\n", status=255)
    with pytest.raises(ConfigError, match=r"could not read the state .*--inventory local"):
        load_cluster(None, env=site.env)


@pytest.mark.parametrize(
    ("err", "message", "status"),
    [
        ("error: no stack named 'dev' found", "pulumi stack ls", ExitCode.CONFIG),
        ("error: no Pulumi.yaml project file found", "project's folder", ExitCode.CONFIG),
        ("error: PULUMI_ACCESS_TOKEN must be set for login", "pulumi login", ExitCode.AUTH),
        (
            "error: getting secrets manager: passphrase must be set with PULUMI_CONFIG_PASSPHRASE",
            "Set PULUMI_CONFIG_PASSPHRASE",
            ExitCode.AUTH,
        ),
        ("", "failed: no output", ExitCode.CONFIG),
    ],
)
def test_what_pulumi_complains_about_is_said_with_what_to_do(
    site: Site, capsys: pytest.CaptureFixture[str], err: str, message: str, status: ExitCode
) -> None:
    site.pulumi.on("stack", "output", err=err, status=255)
    assert main(["preflight", "--inventory", "stack:dev"], site.env) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: `pulumi stack output --json`") and message in line


@pytest.mark.parametrize("name", ["", "--yes", "a b", "$(id)", "a/b/c/d"])
def test_a_name_that_no_stack_can_have_is_refused(site: Site, name: str) -> None:
    with pytest.raises(ConfigError, match="must have letters, digits, dots"):
        load_cluster(f"stack:{name}", env=site.env)
    assert site.pulumi.calls() == []


@pytest.mark.parametrize("name", ["a_b", "a.b", "-a", "a-", "Dev", "a" * 25, 3])
def test_a_cluster_name_that_up_would_refuse_is_refused_with_the_rule(
    site: Site, name: object
) -> None:
    pulumi = Pulumi(site.env, folder=site.folder)
    with pytest.raises(ConfigError, match="up to 24 lower-case letters, digits and hyphens"):
        cluster_name(pulumi, {"cluster": name})
    assert cluster_name(pulumi, {"cluster": "a-1"}) == "a-1"


def test_a_pulumi_that_does_not_answer_is_not_waited_for_longer_than_the_deadline(
    site: Site,
) -> None:
    site.pulumi.on("stack", "output", takes_s=3600.0)
    with pytest.raises(PulumiError, match=r"did not finish within 0\.5 s"):
        read_outputs(Pulumi(site.env, folder=site.folder, timeout_s=0.5))


def test_outputs_of_another_release_or_without_sense_are_refused(site: Site) -> None:
    pulumi = Pulumi(site.env, folder=site.folder)
    good = inventory_output("mine", ["mine-0"])
    for outputs, message in (
        (
            {"inventory": good | {"schema_version": 0}},
            "schema_version is 0, but this release reads 1",
        ),
        ({"inventory": good}, "output project = None"),
        ({"inventory": good, "project": "p", "region": "r", "hourly_usd": "x"}, "hourly_usd"),
        ({"inventory": good, "project": "p", "region": "r", "expires": "soon"}, "ISO 8601"),
        ({"inventory": "{"}, "not JSON"),
        ({"other": 1}, "has no output `inventory`"),
    ):
        site.pulumi.outputs(**outputs)
        with pytest.raises(ConfigError, match=message):
            read_outputs(pulumi)
    site.pulumi.on("stack", "output", out="Current stack outputs (0)")
    with pytest.raises(ConfigError, match="output --json`: not JSON"):
        read_outputs(pulumi)


def test_keys_are_read_once_and_again_for_another_machine(site: Site) -> None:
    site.build()
    first = pin(site)
    assert pin(site) == first
    assert site.cloud.count(ATTRIBUTES) == 3
    site.cloud.drop("instances", "mine-1")
    site.cloud.add_node("mine-1", labels={})
    site.cloud.guest_attributes["mine-1"] = {"ssh-ed25519": KEY.replace("Ghvc", "Gh2c")}
    said: list[str] = []
    second = pin(site, said=said)
    assert site.cloud.count(ATTRIBUTES) == 4
    assert second.nodes[0] == first.nodes[0] and second.nodes[1] != first.nodes[1]
    assert said == ["mine-1: the machine was replaced; its host keys are new"]
    cached = read_json(site.folder / "host_keys.json")["inventory"]["nodes"][1]
    assert tuple(cached["host_keys"]) == second.nodes[1].host_keys


def test_an_address_that_changed_after_up_comes_from_google(site: Site) -> None:
    site.build(nodes=2)
    head, worker = site.cloud.items["instances", ZONE]
    for machine, address in ((head, "203.0.113.99"), (worker, "203.0.113.98")):
        machine["networkInterfaces"] = [{"accessConfigs": [{"natIP": address}]}]
    inventory = inventory_output("mine", ["mine-0", "mine-1"], access={"kind": "direct"})
    inventory["nodes"][0]["external_address"] = "203.0.113.7"
    site.pulumi.outputs(inventory=inventory, project=PROJECT, region=REGION)
    # Workers are reached through the head.
    assert [node.external_address for node in pin(site).nodes] == ["203.0.113.99", None]


def test_keys_that_are_not_there_yet_are_waited_for(site: Site) -> None:
    site.build()
    entry = site.cloud.guest_attributes.pop("mine-2")
    said: list[str] = []

    def sleep(seconds: float) -> None:
        site.sleeps.append(seconds)
        if len(site.sleeps) == 2:
            site.cloud.guest_attributes["mine-2"] = entry

    inventory = pin_host_keys(
        read_outputs(Pulumi(site.env, folder=site.folder)).inventory,
        site.google(),
        cache=site.folder / "host_keys.json",
        say=said.append,
        sleep=sleep,
    )
    assert inventory.nodes[2].host_keys
    assert said == [
        "mine-2: booting; waiting for its host keys",
        "mine-2: host keys published",
    ]


def test_each_node_that_cannot_be_pinned_is_named(site: Site) -> None:
    site.build()
    site.cloud.drop("instances", "mine-0")
    del site.cloud.guest_attributes["mine-1"]
    with pytest.raises(NodesError) as caught:
        pin(site, deadline_s=0.0)
    text = str(caught.value)
    assert "failed on 2 node(s)" in text
    assert "mine-0: the machine no longer exists" in text
    assert "mine-1: no host keys published within 0 s" in text
    assert caught.value.exit_code == BootstrapError.exit_code
    assert not (site.folder / "host_keys.json").exists()


@pytest.mark.parametrize(
    ("fault", "message", "status"),
    [
        (
            Fault(
                path=ATTRIBUTES,
                status=403,
                reason="forbidden",
                message="Constraint constraints/compute.disableGuestAttributesAccess violated",
            ),
            "organization policy compute.disableGuestAttributesAccess",
            ExitCode.AUTH,
        ),
        (
            Fault(path=ATTRIBUTES, status=403, reason="forbidden", message="Required permission"),
            "Request the roles",
            ExitCode.AUTH,
        ),
        (Fault(path=ATTRIBUTES, status=503), "returned 503", ExitCode.PREFLIGHT),
        (
            Fault(path=ATTRIBUTES, status=404, message="The resource 'x'"),
            "no longer exists",
            ExitCode(41),
        ),
    ],
)
def test_each_way_of_not_getting_keys_has_its_own_end(
    site: Site, fault: Fault, message: str, status: ExitCode
) -> None:
    site.build()
    site.cloud.faults.append(fault)
    with pytest.raises(NodesError) as caught:
        pin(site)
    assert message in str(caught.value) and caught.value.exit_code == status


def test_a_stopped_machine_is_not_asked_for_keys(site: Site) -> None:
    site.build()
    site.cloud.items["instances", "us-central1-a"][0]["status"] = "TERMINATED"
    with pytest.raises(NodesError, match="mine-0: the machine is TERMINATED"):
        pin(site)


def test_a_stack_whose_machines_are_all_gone_says_so(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.build()
    for number in range(3):
        site.cloud.drop("instances", f"mine-{number}")
    assert main(["preflight", "--inventory", "stack"], site.env) == RankLostError.exit_code
    assert "all 3 machine(s) are gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("ssh-ed25519", "not_base64!"),
        ("ssh-ed25519", "*"),
        ("ssh-ed25519", KEY[:-1]),
        ("ssh-ed25519", "AAAA"),
        ("ssh-rsa", KEY),
        ("ssh-ed25519\nmine-1 ssh-rsa", KEY),
    ],
)
def test_a_key_that_is_none_is_refused(site: Site, kind: str, value: str) -> None:
    site.build()
    site.cloud.guest_attributes["mine-0"] = {kind: value}
    with pytest.raises(NodesError, match="mine-0: published an invalid host key") as e:
        pin(site)
    assert e.value.exit_code == ExitCode.HOST_KEY


def test_only_the_first_word_of_an_attribute_is_a_key(site: Site) -> None:
    site.build()
    site.cloud.guest_attributes["mine-0"] = {"ssh-ed25519": f"{KEY}\nmine-1 ssh-ed25519 {KEY}"}
    assert pin(site).nodes[0].host_keys == (f"ssh-ed25519 {KEY}",)


def test_a_damaged_cache_is_read_again(site: Site) -> None:
    site.build()
    Path(site.folder / "host_keys.json").write_text('{"schema_version": 1, "inventory": 7}')
    assert all(node.host_keys for node in pin(site).nodes)
