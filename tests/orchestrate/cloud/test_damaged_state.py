"""A truncated state, as after a full disk: the error has both fixes, and `down` works anyway."""

from __future__ import annotations

import json

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.cluster_records import record_plan
from payload.orchestrate.ssh.remote_run_folders import NodeRun
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.stacks import Capture, head_says, words
from tests.orchestrate.cloud.standin import PROJECT, ZONE

pytestmark = pytest.mark.processes
CUT_OFF = "error: failed to load checkpoint: unexpected end of JSON input\n"
READS = ("stack output", "stack export", "preview", "up", "destroy", "refresh")


def damage(site: Site, *more: str, said: str = CUT_OFF) -> None:
    """Make every command that reads the state fail."""
    for each in (*READS, *more):
        site.pulumi.on(*each.split(), err=said, status=255)


def reach(site: Site) -> None:
    """Write the folder's files of a command that reached the nodes."""
    main(["preflight", "--inventory", "stack", "--quick"], site.env)
    assert (site.folder / ".cluster" / "mine" / "host_keys.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        CUT_OFF,
        "error: failed to load checkpoint: invalid character 'x' looking for beginning of value\n",
        "error: could not deserialize deployment: unexpected end of JSON input\n",
        "error: snapshot integrity failure; refusing to use it: resource refers to no provider\n",
    ],
)
@pytest.mark.parametrize("command", ["up --yes", "down --yes", "preflight --inventory stack"])
def test_a_damaged_state_is_exit_10_with_both_ways_out(
    site: Site, capsys: Capture, command: str, said: str
) -> None:
    site.build()
    damage(site, said=said)
    assert main(command.split(), site.env) == ExitCode.CONFIG
    err = capsys.readouterr().err
    assert "Replace STACK.json with its backup STACK.json.bak" in err
    assert "sweep --cluster NAME --project P --delete" in err
    assert site.cloud.count("^(DELETE|POST)") == 0


def test_credentials_of_a_backend_that_have_expired_are_no_damage(
    site: Site, capsys: Capture
) -> None:
    damage(site, said="error: failed to load checkpoint: blob (code=Unknown): ExpiredToken\n")
    assert main(["up", "--yes"], site.env) == ExitCode.CONFIG
    assert "STACK.json.bak" not in capsys.readouterr().err


@pytest.mark.slow
def test_down_without_a_state_removes_what_google_has(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.build()
    reach(site)
    damage(site, "config", "stack --show-name")
    head_says(monkeypatch)
    capsys.readouterr()
    assert main(["down", "--yes"], site.env) == ExitCode.USAGE
    assert "the cluster's name is unknown. Set the name with --cluster." in capsys.readouterr().err
    assert main(["down", "--yes", "--cluster", "mine"], site.env) == ExitCode.TEARDOWN
    err = capsys.readouterr().err
    assert f"resources of mine in {PROJECT} are listed from Google Cloud, not from" in err
    assert "leftovers of cluster mine: " in err and "3/3 sweep: clean" in err
    assert site.cloud.items["instances", ZONE] == []
    last = err.splitlines()[-1]
    assert "no resource of the cluster was found, but `pulumi destroy`" in last
    assert "pulumi stack init NAME" in last and "pulumi refresh" not in last


def test_down_without_a_state_asks_the_head_first(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.build()
    reach(site)
    damage(site)
    head_says(monkeypatch, runs=[NodeRun(run_id="one", checkpoint="step_00000005", state="0")])
    capsys.readouterr()
    assert main(["down", "--yes"], site.env) == ExitCode.CONFIG
    assert "removed or damaged): one, so nothing was destroyed" in capsys.readouterr().err
    assert main(["down", "--dry-run"], site.env) == ExitCode.OK
    assert "mine-0" in capsys.readouterr().out
    assert not any(each.startswith("destroy") for each in words(site))
    assert site.cloud.count("^DELETE") == 0


def test_down_without_a_state_or_a_memory_of_the_nodes_loses_results_only_when_told(
    site: Site, capsys: Capture
) -> None:
    site.build()
    damage(site)
    assert main(["down", "--yes"], site.env) == ExitCode.CONFIG
    last = capsys.readouterr().err.splitlines()[-1]
    assert "this folder has no record of mine" in last and "nothing was destroyed" in last
    assert f"down --without-collect --cluster mine --project {PROJECT}" in last
    # It also has no record of another project.
    record_plan("mine", {"project": "another"}, folder=site.folder)
    assert main(["down", "--yes", "--project", PROJECT], site.env) == ExitCode.CONFIG
    assert site.cloud.count("^DELETE") == 0
    assert main(["down", "--yes", "--without-collect"], site.env) == ExitCode.TEARDOWN
    assert site.cloud.items["instances", ZONE] == []


def test_doctor_says_that_the_state_is_damaged(site: Site, capsys: Capture) -> None:
    site.build()
    damage(site)
    main(["doctor", "--json"], site.env)
    checks = {each["name"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["firewall"]["outcome"] == checks["machines"]["outcome"] == "unknown"
    assert "STACK.json.bak" in checks["machines"]["fix"]
