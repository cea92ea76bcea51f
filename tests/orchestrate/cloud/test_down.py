"""`down`: collects results, destroys, then verifies that nothing is left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.__main__ import main
from payload.orchestrate.ssh.remote_run_folders import NodeRun
from payload.stack.operator_key_file import make_operator_key
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.stacks import Capture, copy_of_run, destroys, head_says, stay, words
from tests.orchestrate.cloud.standin import PROJECT

pytestmark = pytest.mark.processes


def test_down_destroys_and_shows_that_nothing_is_left(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.build()
    head_says(monkeypatch)
    destroys(site)
    assert main(["down", "--yes"], site.env) == ExitCode.OK
    err = capsys.readouterr().err
    steps = ["1/3 collect: 0 run(s) collected", "2/3 destroy: done", "3/3 sweep: clean"]
    lines = err.splitlines()
    # The plan is printed first; then each step's number with its result, in order.
    assert [line for line in lines if line[1:3] == "/3"] == steps
    assert lines.index("to verify: no resource of mine remains in acme-lab") < lines.index(steps[0])
    assert "kept with its results: gs://mine-results" in err
    assert words(site) == [
        "stack output --json",
        "destroy --yes --skip-preview --exclude-protected",
    ]


def test_down_with_something_left_is_exit_60(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.build()
    head_says(monkeypatch)
    destroys(site, leaves=("mine-1", "mine-network"))
    stay(site, "mine-1", "mine-network")
    assert main(["down", "--yes"], site.env) == ExitCode.TEARDOWN
    out, err = capsys.readouterr()
    assert "3/3 sweep: not clean" in err
    assert "gcloud compute instances delete mine-1" in err
    assert "error: 3 resource(s) of cluster mine left" in err
    assert "mine-network" in out


def test_a_destroy_that_fails_is_followed_by_the_sweep_all_the_same(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.build()
    head_says(monkeypatch)
    destroys(site, status=255, out="error: update failed: resource is in use\n", leaves=("mine-0",))
    stay(site, "mine-0")
    assert main(["down", "--yes"], site.env) == ExitCode.TEARDOWN
    err = capsys.readouterr().err
    assert "2/3 destroy: FAILED: pulumi destroy: update failed" in err
    assert "delete mine-0" in err


def test_a_dry_run_of_down_changes_nothing(site: Site, capsys: Capture) -> None:
    site.build()
    assert main(["down", "--dry-run"], site.env) == ExitCode.OK
    out, err = capsys.readouterr()
    assert "mine-0" in out and "dry run: nothing was collected or destroyed" in err
    assert words(site) == ["stack output --json"]
    assert site.cloud.count("^(DELETE|POST)") == 0


def test_results_that_cannot_be_brought_home_stop_the_destroy(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_operator_key(site.folder / "key")
    site.build()
    destroys(site)
    copy_of_run(site, "one", alive=True)
    head_says(monkeypatch)
    assert main(["down", "--yes"], site.env) == ExitCode.SSH_UNREACHABLE
    err = capsys.readouterr().err
    assert "to collect: one" in err
    assert "run one could not be collected, so nothing was destroyed" in err
    assert "down --without-collect" in err
    assert words(site) == ["stack output --json"]
    assert main(["down", "--yes", "--without-collect"], site.env) == ExitCode.OK


@pytest.mark.parametrize("has_key", [True, False])
def test_nothing_is_destroyed_while_the_head_cannot_be_asked(
    site: Site, capsys: Capture, has_key: bool
) -> None:
    site.build()
    destroys(site)
    copy_of_run(site, "one", alive=False, collected="")
    if has_key:  # no machine has this address
        make_operator_key(site.folder / "key")
    assert main(["down", "--yes"], site.env) == ExitCode.CONFIG
    err = capsys.readouterr().err
    assert "warning: cannot determine if a run is active: " in err
    last = err.splitlines()[-1]
    assert "cannot determine if a run is active, so nothing was destroyed" in last
    assert "down --without-collect" in last
    assert words(site) == ["stack output --json"]
    assert main(["down", "--yes", "--without-collect"], site.env) == ExitCode.OK


@pytest.mark.parametrize("name", ["mirror.json", "inventory.json", "summary.json"])
def test_a_damaged_copy_keeps_down_from_what_the_head_has_of_it_and_from_nothing_else(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    site.build()
    destroys(site)
    paths = copy_of_run(site, "one", alive=False)
    (paths.root / name).write_text("[[[")
    there = NodeRun(run_id="one", checkpoint="step_00000005", state="0" * 64)
    head_says(monkeypatch, runs=[there])
    assert main(["down", "--yes"], site.env) != ExitCode.OK
    err = capsys.readouterr().err
    if name != "summary.json":
        assert "warning: run one: the local copy is ignored" in err
        assert "removed or damaged): one, so nothing was destroyed" in err
        assert "attach one --inventory stack" in err.splitlines()[-1]
    assert words(site) == ["stack output --json"]
    # Runs that are on no machine of this cluster are ignored.
    if name != "summary.json":
        head_says(monkeypatch)
        assert main(["down", "--yes"], site.env) == ExitCode.OK


@pytest.mark.parametrize(("cluster", "collected"), [("other", None), ("mine", "")])
def test_runs_of_other_clusters_and_collected_ones_are_left_alone(
    site: Site,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    cluster: str,
    collected: str | None,
) -> None:
    site.build(cluster=cluster)
    head_says(monkeypatch)
    destroys(site)
    # If a run failed before its first checkpoint, files cannot prove that the copy is complete.
    copy_of_run(site, "one", alive=collected is None, collected=collected)
    assert main(["down", "--yes"], site.env) == ExitCode.OK
    assert "to collect: no run" in capsys.readouterr().err


@pytest.mark.parametrize("replaced", [True, False])
def test_results_that_went_with_their_machine_do_not_keep_down_from_the_rest(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    site.build()
    destroys(site)
    copy_of_run(site, "one", alive=True, instance_id="77")
    if replaced:
        head_says(monkeypatch, machine="78")
    else:
        site.cloud.drop("instances", "mine-0")
    assert main(["down", "--yes"], site.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert "run one: its results are lost: the machine no longer exists" in err
    assert "to collect: no run" in err


def test_a_stack_that_never_came_up_whole_can_be_taken_down(site: Site, capsys: Capture) -> None:
    site.build(expires_in_s=-60)
    site.pulumi.outputs()
    config = {"tileforge:project": {"value": PROJECT}, "gcp:project": {"value": "another"}}
    site.pulumi.on("config", "--json", out=json.dumps(config))
    # Without the setting `cluster`, the cluster has the stack's name.
    site.pulumi.on("stack", "--show-name", out="my-org/tileforge/mine\n")
    destroys(site, leaves=("mine-0",))
    stay(site, "mine-0")
    # From an earlier cluster of that name.
    copy_of_run(site, "one", alive=True, instance_id="77")
    assert main(["down", "--yes"], site.env) == ExitCode.TEARDOWN
    err = capsys.readouterr().err
    assert "run one: its results are lost: the machine no longer exists" in err
    assert "instances delete mine-0" in err


def test_down_without_pulumi_or_with_another_name_does_nothing(site: Site, capsys: Capture) -> None:
    assert main(["down", "--yes"], {**site.env, "PATH": "/nowhere"}) == ExitCode.CONFIG
    site.build()
    assert main(["down", "--yes", "--cluster", "other"], site.env) == ExitCode.CONFIG
    assert "the stack's cluster is mine" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_copy_from_a_cluster_of_the_name_in_another_project_is_left_out(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.build()
    head_says(monkeypatch)
    destroys(site)
    paths = copy_of_run(site, "one", alive=True)
    was = ClusterInventory.load(paths.inventory)
    paths.inventory.write_text(replace(was, source="pulumi", project="old-lab").to_json())
    assert main(["down", "--yes"], site.env) == ExitCode.OK
    assert "to collect: no run" in capsys.readouterr().err
