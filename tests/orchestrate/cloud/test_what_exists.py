"""After a failure `up` reports the machines that Google lists, or that it cannot list them."""

from __future__ import annotations

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from tests.orchestrate.cloud.conftest import Site, inventory_output
from tests.orchestrate.cloud.fake_pulumi import step
from tests.orchestrate.cloud.stacks import Capture, destroys, words
from tests.orchestrate.cloud.standin import ZONE, Fault

pytestmark = pytest.mark.processes
STACK = "urn:pulumi:dev::tileforge::pulumi:pulumi:Stack::tileforge-dev"
# The creation was accepted; polling its progress was refused.
POLLS = [
    (
        "googleapi: Error 403: Quota exceeded for quota metric 'Queries', rateLimitExceeded",
        ExitCode.PREFLIGHT,
    ),
    ("Error waiting for instance to create: googleapi: Error 401: Invalid Credentials", 13),
]


def expects(site: Site, *names: str) -> None:
    """Set the preview's expected machines with prices."""
    outputs = {"inventory": inventory_output("mine", list(names))}
    done = step("create", STACK, kind="resOutputsEvent", new={"outputs": outputs})
    site.pulumi.on("preview", events=done)


@pytest.mark.parametrize(("said", "status"), POLLS)
def test_machines_that_pulumi_does_not_know_of_are_found_and_taken_back(
    site: Site, capsys: Capture, said: str, status: int
) -> None:
    expects(site, "mine-0", "mine-1")
    site.pulumi.on("up", out=f"error: {said}\n", status=255)
    site.build(nodes=2)
    destroys(site, leaves=("mine-0", "mine-1"))
    assert main(["up", "--yes"], site.env) == status
    err = capsys.readouterr().err
    assert "No machine was built" not in err
    assert "built so far: mine-0, mine-1" in err
    assert "The new resources were removed" in err.splitlines()[-1]
    assert site.cloud.items["instances", ZONE] == []


def test_machines_that_cannot_be_listed_are_unknown_with_the_price_of_all(
    site: Site, capsys: Capture
) -> None:
    expects(site, "mine-0", "mine-1")
    site.pulumi.on("up", out=f"error: {POLLS[1][0]}\n", status=255)
    site.cloud.faults.append(
        Fault(path="aggregated/instances", status=401, message="Invalid Credentials", times=99)
    )
    assert main(["up", "--yes"], site.env) == ExitCode.TEARDOWN
    last = capsys.readouterr().err.splitlines()[-1]
    assert "No machine was built" not in last
    assert "Error 401: Invalid Credentials" in last
    assert "the machines could not be listed (" in last
    assert "if all exist, they cost $1.06/h until their lifetime ends" in last
    assert "sweep --cluster mine --project acme-lab" in last and "orchestrate down" in last
    assert not any(each.startswith("destroy") for each in words(site))


def test_a_zone_that_does_not_answer_makes_it_unknown(site: Site, capsys: Capture) -> None:
    site.pulumi.on("preview")
    site.pulumi.on("up", out=f"error: {POLLS[0][0]}\n", status=255)
    site.cloud.unreachable.append("zones/us-central1-a")
    assert main(["up", "--yes"], site.env) == ExitCode.TEARDOWN
    last = capsys.readouterr().err.splitlines()[-1]
    assert "us-central1-a does not respond" in last
    assert "if all exist, they cost an unknown amount" in last


def test_no_machine_is_a_listing_without_one(site: Site, capsys: Capture) -> None:
    expects(site, "mine-0")
    site.pulumi.on("up", out="error: Quota 'NETWORKS' exceeded.  Limit: 5.0\n", status=255)
    site.cloud.add_node("mine-0", labels={"tileforge-cluster": "another"})
    assert main(["up", "--yes"], site.env) == ExitCode.QUOTA
    assert "No machine was built." in capsys.readouterr().err
    assert site.cloud.count("aggregated/instances") == 1
    assert not any(each.startswith("destroy") for each in words(site))


def test_machines_that_were_there_before_are_left_with_what_is_on_them(
    site: Site, capsys: Capture
) -> None:
    expects(site, "mine-0", "mine-1")
    site.pulumi.on("up", out=f"error: {POLLS[0][0]}\n", status=255)
    site.build(nodes=2)
    for item in site.cloud.items["instances", ZONE]:
        item["creationTimestamp"] = "2026-01-01T08:00:00.000-08:00"
    assert main(["up", "--yes"], site.env) == ExitCode.PREFLIGHT
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        "These resources are kept, because they existed before this `up`: mine-0, mine-1." in last
        and "are kept and billed" in last
    )
    assert site.cloud.count("^DELETE") == 0
    assert not any(each.startswith("destroy") for each in words(site))
