"""`sweep`: finds leftovers, and distinguishes them from other users' resources."""

from __future__ import annotations

import json
import re
import time

import pytest

from infra.gcp.labels import mark
from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.orchestrate.clouds.gcp.leftovers import find_leftovers
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.stack_outputs import read_outputs, record_outputs
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.standin import PROJECT, ZONE, Fault
from tests.support.identities import cluster_labels

Capture = pytest.CaptureFixture[str]
LABELS = cluster_labels("mine")


def sweep(site: Site, *arguments: str) -> int:
    return main(["sweep", "--project", PROJECT, *arguments], site.env)


def test_nothing_left_is_said_and_is_exit_0(site: Site, capsys: Capture) -> None:
    site.cloud.add("networks", "default", place="global", labels={})
    site.cloud.add_node("somebody-elses", labels={})
    site.cloud.add_bucket("mine-photos", labels={})
    site.cloud.add_service_account("mine-nodes", shown="nodes of our Kubernetes cluster")
    assert sweep(site, "--cluster", "mine") == ExitCode.OK
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "0 resources of cluster mine left in project acme-lab: checked 14 kinds in all zones "
        "and regions\n"
    )


@pytest.mark.processes
def test_everything_left_is_listed_with_what_removes_it(site: Site, capsys: Capture) -> None:
    site.build()
    record_outputs(read_outputs(Pulumi(site.env, folder=site.folder)), folder=site.folder)
    site.cloud.add_node("other-0", labels={"tileforge-cluster": "mine-two"})
    site.cloud.add("networks", "mine-two-network", place="global", labels={})
    network = "https://x/global/networks/mine-network"
    site.cloud.add("firewalls", "added-by-hand", place="global", labels={}, network=network)
    for place in ("us-central1", "global"):
        site.cloud.add("addresses", "mine-ip", place=place, labels=LABELS)
        site.cloud.add("forwardingRules", "mine-rule", place=place, labels=LABELS)
    site.cloud.add("snapshots", "before", place="global", labels=LABELS)
    site.cloud.add("images", "baked", place="global", labels=LABELS)
    # Without --project: the cluster was built from this folder.
    assert main(["sweep", "--cluster", "mine"], site.env) == ExitCode.TEARDOWN
    out, err = capsys.readouterr()
    assert "other-0" not in out and "mine-two" not in out
    rows = {tuple(line.split()[:2]) for line in out.splitlines()[1:]}
    assert {("instance", "mine-0"), ("disk", "mine-2"), ("bucket", "mine-results")} <= rows
    assert "0.529" in out and "us-central1-a" in out and re.search(r" \d{1,2} s ", out)
    commands = [line.partition(": ")[2] for line in err.splitlines() if line.startswith("remove")]
    assert commands[0] == (
        "gcloud compute instances delete mine-0 --zone=us-central1-a --project=acme-lab --quiet"
    )
    for part in (
        "addresses delete mine-ip --global",
        "addresses delete mine-ip --region=us-central1",
        "forwarding-rules delete mine-rule --global",
        "firewall-rules delete mine-allow-ssh --project",
        "resource-policies delete mine-placement --region=us-central1",
        "networks subnets delete mine-subnet --region=us-central1",
        "snapshots delete before",
        "images delete baked",
        "gcloud storage rm --recursive gs://mine-results",
    ):
        assert any(part in command for command in commands), part
    order = [command.split()[2] for command in commands]
    assert order.index("routers") < order.index("firewall-rules") < order.index("networks")
    assert commands[-3].startswith("gcloud compute networks delete mine-network")
    assert commands[-2] == (
        "gcloud iam service-accounts delete mine-nodes@acme-lab.iam.example --project=acme-lab "
        "--quiet"
    )
    last = err.splitlines()[-1]
    assert last.startswith("error: 19 resource(s) of cluster mine left in project acme-lab, at le")
    assert "$1.59/h" in last
    assert "added-by-hand" in out and not any("added-by-hand" in each for each in commands)
    assert (
        "not this cluster's, kept: without an identity since " in err
        and "UTC: firewall rule added-by-hand" in err
    )


def test_without_a_name_only_what_has_expired_counts(site: Site, capsys: Capture) -> None:
    site.build(cluster="new", nodes=1)
    assert sweep(site) == ExitCode.OK
    out, err = capsys.readouterr()
    assert "expires in 1 h" in out
    assert "0 resources of expired clusters left" in err
    assert "only clusters whose lifetime has ended count; --cluster NAME" in err
    site.build(cluster="old", nodes=1, expires_in_s=-7200)
    assert sweep(site) == ExitCode.TEARDOWN
    out, err = capsys.readouterr()
    assert "expired 2 h ago" in out
    assert "delete old-0" in err and "delete old-network" in err and "new-" not in err


def test_what_machines_that_are_gone_have_left_is_seen_from_anywhere(
    site: Site, capsys: Capture
) -> None:
    site.build(cluster="old", expires_in_s=-7200)
    # Google deleted the machines at their limit, so no labelled resource is left.
    for kind in ("instances", "disks"):
        site.cloud.items[kind, ZONE].clear()
    site.cloud.buckets.clear()
    site.cloud.items["serviceAccounts", "global"].clear()
    site.build(cluster="new", nodes=0)
    assert sweep(site) == ExitCode.TEARDOWN
    out, err = capsys.readouterr()
    assert "5 resource(s) of expired clusters left" in err and "expired 2 h ago" in out
    for name in ("network", "subnet", "router", "allow-ssh", "placement"):
        assert f"delete old-{name} " in err
    assert "new-network" in out and "new-" not in err


def test_json_is_for_programs(site: Site, capsys: Capture) -> None:
    site.cloud.add_node("mine-0", labels=LABELS)
    site.cloud.add_bucket("mine-results", labels=LABELS)
    assert sweep(site, "--cluster", "mine", "--keep-buckets", "--json") == ExitCode.TEARDOWN
    document = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in document["left"]["mine"]] == ["mine-0"]
    assert [each["name"] for each in document["kept"]] == ["mine-results"]


def test_buckets_may_be_kept(site: Site, capsys: Capture) -> None:
    site.cloud.add_bucket("mine-results", labels=LABELS)
    assert sweep(site, "--cluster", "mine") == ExitCode.TEARDOWN
    assert sweep(site, "--cluster", "mine", "--keep-buckets") == ExitCode.OK
    out, err = capsys.readouterr()
    assert "kept, with results" in out and "gs://mine-results" in err
    site.cloud.buckets[0]["labels"]["tileforge-kept"] = "true"
    assert sweep(site, "--cluster", "mine") == ExitCode.OK
    assert "kept with its results: gs://mine-results" in capsys.readouterr().err
    # It also does not count without --cluster, although its cluster has expired.
    assert sweep(site) == ExitCode.OK


def test_what_could_not_be_seen_is_not_taken_for_gone(site: Site, capsys: Capture) -> None:
    site.cloud.faults.append(
        Fault(path="aggregated/routers", status=403, reason="forbidden", message="Required x")
    )
    assert sweep(site, "--cluster", "mine") == ExitCode.TEARDOWN
    err = capsys.readouterr().err
    assert "some could not be listed: listing routers: Required x" in err


def test_without_a_name_nothing_is_removed_while_a_zone_is_silent(
    site: Site, capsys: Capture
) -> None:
    # Its network is old, and the machines that show that it is in use are not listed.
    site.build(cluster="old", expires_in_s=-7200)
    for items in (site.cloud.items[kind, ZONE] for kind in ("instances", "disks")):
        for item in items:
            item["labels"]["tileforge-expires"] = str(int(time.time()) + 3600)
    assert sweep(site, "--delete", "--yes") == ExitCode.OK
    assert "expires in" in capsys.readouterr().out
    site.cloud.failing = {f"zones/{ZONE}": "The zone is down"}
    assert sweep(site, "--delete", "--yes") == ExitCode.TEARDOWN
    out, err = capsys.readouterr()
    assert "old-network" in out and "remove with" not in err
    assert "can be in use in locations that were not listed: listing" in err
    assert "us-central1-a: UNREACHABLE: The zone is down" in err
    assert site.cloud.count("^DELETE") == 0
    # With --cluster it is removed.
    assert sweep(site, "--cluster", "old", "--delete", "--yes") == ExitCode.TEARDOWN
    assert site.cloud.count("^DELETE .*old-network") == 1


def test_refused_altogether_is_a_matter_of_permission(site: Site, capsys: Capture) -> None:
    site.cloud.faults.append(
        Fault(path="compute", status=403, reason="forbidden", message="Required x", times=99)
    )
    assert sweep(site) == ExitCode.AUTH
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_delete_removes_all_but_buckets_and_tells_what_would_not_go(
    site: Site, capsys: Capture
) -> None:
    site.build()
    site.cloud.stuck["mine-network"] = "The network is already being used by 'x'"
    # One was removed by another user in between, which is not an error.
    site.cloud.faults.append(
        Fault(method="DELETE", path="disks/mine-1", status=404, message="was not found")
    )
    site.cloud.drop("disks", "mine-1")
    site.cloud.add("disks", "mine-1", place="us-central1-b", labels=LABELS)
    site.cloud.faults.append(Fault(method="DELETE", path="instances/mine-0", status=503))
    assert sweep(site, "--cluster", "mine", "--delete", "--yes") == ExitCode.TEARDOWN
    out, err = capsys.readouterr()
    assert "warning: removing network mine-network: The network is already being used by 'x'" in err
    assert "mine-0" in out
    left = {item["name"] for items in site.cloud.items.values() for item in items}
    assert left == {"mine-network", "mine-1"}
    assert [bucket["name"] for bucket in site.cloud.buckets] == ["mine-results"]
    del site.cloud.stuck["mine-network"]
    arguments = ("--cluster", "mine", "--delete", "--yes", "--keep-buckets")
    assert sweep(site, *arguments) == ExitCode.OK
    assert not any(site.cloud.items.values())


def test_a_copy_of_a_disk_is_named_with_its_command_and_kept(site: Site, capsys: Capture) -> None:
    site.build()
    site.cloud.add("snapshots", "before", place="global", labels=LABELS)
    site.cloud.add("images", "baked", place="global", labels=LABELS)
    arguments = ("--cluster", "mine", "--delete", "--yes", "--keep-buckets")
    assert sweep(site, *arguments) == ExitCode.TEARDOWN
    said = capsys.readouterr()
    assert re.search("snapshot  before  global", said.out)
    assert "images delete baked --project=acme-lab --quiet  # deletes the saved data" in said.err
    assert "2 resource(s) of cluster mine left" in said.err.splitlines()[-1]
    left = {item["name"] for items in site.cloud.items.values() for item in items}
    assert left == {"before", "baked"}


@pytest.mark.parametrize("width", [80, 60])
def test_the_tables_fit_a_terminal_and_omit_nothing(site: Site, width: int) -> None:
    cluster = "a-long-name-of-a-cluster"
    labels = cluster_labels(cluster)
    for index in range(2):
        site.cloud.add_node(f"{cluster}-node-{index}", labels=labels)
    site.cloud.add_service_account(f"{cluster}-nodes", shown="", description=mark(labels))
    rule = f"{cluster}-egress-filestore"
    site.cloud.add("firewalls", rule, place="global", labels={}, description=mark(labels))
    site.cloud.add_bucket(f"{cluster}-results", labels=labels)
    google = Google(PROJECT, endpoints=Endpoints.from_env(site.env))
    found = find_leftovers(google, None, folder=site.folder, keep_buckets=True)
    lines = found.lines(width=width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and "\u2026" not in text
    for part in (f"cluster {cluster}: expired ", "firewall rule", rule, "us-central1-a"):
        assert part in text


def test_things_of_a_kind_are_removed_at_once_and_kinds_in_turn(site: Site) -> None:
    site.build()
    site.cloud.stuck["mine-1"] = "It is protected"
    sweep(site, "--cluster", "mine", "--delete", "--yes", "--keep-buckets")
    asked = [each for each in site.cloud.requests if re.match("DELETE|POST", each)]
    words = [each.partition("?")[0].split("/") for each in asked]
    order = [found[-1] if found[0].startswith("DELETE") else "wait" for found in words]
    machines = ["mine-0", "mine-1", "mine-2"]
    # Machines, then their disks, which have the same names.
    assert order[:12] == [*machines, *["wait"] * 3, *machines, *["wait"] * 3]


def test_the_clusters_service_account_is_found_and_removed(site: Site, capsys: Capture) -> None:
    site.cloud.add_service_account(
        "mine-nodes", shown="Nodes of the Tileforge cluster mine", description=mark(LABELS)
    )
    site.cloud.add_service_account(
        "mine-two-nodes", shown="Nodes of the Tileforge cluster mine-two"
    )
    site.cloud.page_size = 1
    assert sweep(site, "--cluster", "mine-two") == ExitCode.TEARDOWN
    assert "service account  mine-two-nodes  global" in capsys.readouterr().out
    assert sweep(site, "--cluster", "mine", "--delete", "--yes") == ExitCode.OK
    (left,) = site.cloud.items["serviceAccounts", "global"]
    assert left["name"] == "mine-two-nodes"


def test_a_clusters_dns_zone_is_found_and_removed_with_its_records(
    site: Site, capsys: Capture
) -> None:
    site.cloud.add_dns_zone("mine-googleapis", labels=LABELS)
    site.cloud.add_dns_zone("somebody-elses", labels={})
    site.cloud.page_size = 1
    assert sweep(site, "--cluster", "mine") == ExitCode.TEARDOWN
    out, err = capsys.readouterr()
    assert "DNS zone  mine-googleapis" in out and "somebody-elses" not in out
    assert "gcloud dns record-sets delete '*.googleapis.com.' --type=CNAME" in err
    assert "; gcloud dns managed-zones delete mine-googleapis --project=acme-lab --quiet" in err
    assert sweep(site, "--cluster", "mine", "--delete", "--yes") == ExitCode.OK
    assert [zone["name"] for zone in site.cloud.items["managedZones", "global"]] == [
        "somebody-elses"
    ]


def test_a_clusters_filestore_instance_is_found_with_its_price_and_removed(
    site: Site, capsys: Capture
) -> None:
    site.cloud.add_filestore("mine-shared", labels=LABELS, network="mine-network")
    site.cloud.add_filestore("somebody-elses", labels={}, network="default")
    site.cloud.page_size = 1
    assert sweep(site, "--cluster", "mine") == ExitCode.TEARDOWN
    out, err = capsys.readouterr()
    assert "Filestore instance  mine-shared" in out and "somebody-elses" not in out
    assert "0.351" in out and "at least $0.35/h" in err
    assert "gcloud filestore instances delete mine-shared --zone=us-central1-a" in err
    assert "# deletes the data on the instance" in err
    deletes = ("--cluster", "mine", "--delete", "--yes")
    assert sweep(site, *deletes) == ExitCode.USAGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert "so nothing was removed" in last and "--delete-filestore mine-shared" in last
    assert len(site.cloud.filestores) == 2
    assert sweep(site, *deletes, "--delete-filestore", "mine-shared") == ExitCode.OK
    assert [name.rpartition("/")[2] for name in site.cloud.filestores] == ["somebody-elses"]


def test_a_filestore_instance_that_stays_or_cannot_be_seen_is_said(
    site: Site, capsys: Capture
) -> None:
    site.cloud.add_filestore("mine-shared", labels=LABELS, network="mine-network")
    site.cloud.filestore_refusal = "the instance has a backup in progress"
    deletes = ("--delete", "--yes", "--delete-filestore", "mine-shared")
    assert sweep(site, "--cluster", "mine", *deletes) == ExitCode.TEARDOWN
    assert "the instance has a backup in progress" in capsys.readouterr().err
    site.cloud.filestores.clear()
    site.cloud.filestore_places_down = [f"projects/{PROJECT}/locations/us-central1-b"]
    assert sweep(site, "--cluster", "mine") == ExitCode.TEARDOWN
    assert "us-central1-b does not respond" in capsys.readouterr().err


def test_a_project_without_filestore_has_no_instances(site: Site) -> None:
    off = "Cloud Filestore API has not been used in project 1 before or it is disabled."
    site.cloud.faults.append(
        Fault(path="/locations/-/inst", status=403, message=off, reason="accessNotConfigured")
    )
    assert sweep(site, "--cluster", "mine") == ExitCode.OK
    site.cloud.faults.append(Fault(path="/locations/-/inst", status=403, message="not allowed"))
    assert sweep(site, "--cluster", "mine") == ExitCode.TEARDOWN


def test_a_project_without_cloud_dns_has_no_zones(site: Site) -> None:
    off = "Cloud DNS API has not been used in project 1 before or it is disabled."
    site.cloud.faults.append(
        Fault(path="^/dns/", status=403, message=off, reason="accessNotConfigured")
    )
    assert sweep(site, "--cluster", "mine") == ExitCode.OK
    site.cloud.faults.append(Fault(path="^/dns/", status=403, message="dns.zones.list is missing"))
    assert sweep(site, "--cluster", "mine") == ExitCode.TEARDOWN


def test_nothing_is_removed_without_a_yes(site: Site, capsys: Capture) -> None:
    site.build()
    assert sweep(site, "--cluster", "mine", "--delete") == ExitCode.USAGE
    assert "repeat with --yes" in capsys.readouterr().err
    assert site.cloud.count("^DELETE") == 0


@pytest.mark.parametrize("name", ["", "Mine", "a b", "-x", "$(id)", "x" * 64, "ünï"])
def test_a_name_that_no_label_can_have_is_refused(site: Site, capsys: Capture, name: str) -> None:
    assert sweep(site, f"--cluster={name}") == ExitCode.CONFIG
    assert "lower-case letters" in capsys.readouterr().err
    assert site.cloud.requests == []


def test_without_a_project_it_asks_for_one(site: Site, capsys: Capture) -> None:
    assert main(["sweep"], site.env) == ExitCode.USAGE
    assert "--project" in capsys.readouterr().err
    assert main(["sweep"], site.env | {"GOOGLE_CLOUD_PROJECT": PROJECT}) == ExitCode.OK
