"""`down --delete-bucket`: the only way to delete a results bucket, and its confirmation."""

from __future__ import annotations

import pytest

from payload.core.errors import ConfigError, ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.gcp.ownership import Ownership
from payload.orchestrate.clouds.gcp.results_bucket_removal import find_bucket
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.stacks import Answers, Capture, destroys, head_says, words
from tests.orchestrate.cloud.standin import PROJECT, Fault

pytestmark = pytest.mark.processes

KEPT = {"tileforge-cluster": "mine", "tileforge-kept": "true"}
OLD = "mine-results-1a2b3c4"
DOWN = ("down", "--yes", "--delete-bucket")


@pytest.fixture
def mine(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a cluster that is up, with an old results bucket, and another cluster's bucket."""
    site.build()
    head_says(monkeypatch)
    destroys(site)
    site.cloud.buckets.clear()
    site.cloud.add_bucket(OLD, labels=KEPT)
    site.cloud.add_bucket("other-results", labels=KEPT | {"tileforge-cluster": "other"})
    site.cloud.add_bucket("mine-photos", labels={"tileforge-cluster": "mine"})
    site.cloud.add_bucket("mine-elsewhere", labels=KEPT, number="1")
    site.cloud.page_size = 2
    site.cloud.objects[OLD] = [
        {"name": "runs/a b/model.safetensors", "generation": "7", "size": str(2**30)},
        {"name": "runs/a b/model.safetensors", "generation": "8", "size": str(2**31)},
        {"name": "runs/ü?#.json", "generation": "9", "size": "12"},
    ]
    return site


def test_the_named_bucket_goes_with_its_old_versions_after_its_name_was_typed(
    mine: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Answers(f"{OLD}\n"))
    assert main([*DOWN, OLD], mine.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert f"Delete gs://{OLD} (3 objects, 3.0 GiB) permanently? Type {OLD} to continue:" in err
    assert err.index("3/3 sweep: clean") < err.index(f"gs://{OLD}: deleted")
    assert [each["name"] for each in mine.cloud.buckets] == [
        *("other-results", "mine-photos", "mine-elsewhere")
    ]
    assert mine.cloud.objects[OLD] == []
    # Again, for the bucket of an earlier stack of the name; the stack is empty now.
    assert main([*DOWN, OLD], mine.env) == ExitCode.CONFIG
    assert "not found in project" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("typed", ["y\n", "yes\n", "\n", "mine\n"])
def test_nothing_happens_unless_the_name_is_typed(
    mine: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.setattr("sys.stdin", Answers(typed))
    assert main([*DOWN, OLD], mine.env) == ExitCode.OK
    assert "nothing was destroyed" in capsys.readouterr().err
    assert words(mine) == ["stack output --json"] and mine.cloud.count("^DELETE") == 0


def test_yes_does_not_answer_for_a_bucket(mine: Site, capsys: Capture) -> None:
    assert main([*DOWN, OLD], mine.env) == ExitCode.USAGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert "Answer this question at a terminal; --yes does not answer it." in last
    assert words(mine) == ["stack output --json"] and mine.cloud.count("^DELETE") == 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "other-results",
            "do not mark it as a results bucket of cluster mine, so the bucket is kept",
        ),
        (
            "mine-photos",
            "do not mark it as a results bucket of cluster mine, so the bucket is kept",
        ),
        (
            "nowhere",
            f"not found in project {PROJECT}. List the cluster's resources: ",
        ),
        ("mine-elsewhere", f"not found in project {PROJECT}. List the cluster's resources"),
        ("gs://mine-results", "must be a bucket's name, without gs://"),
        ("a/../b", "must be a bucket's name, without gs://"),
    ],
)
def test_no_other_bucket_is_touched(mine: Site, capsys: Capture, name: str, line: str) -> None:
    assert main([*DOWN, name], mine.env) == ExitCode.CONFIG
    assert line in capsys.readouterr().err.splitlines()[-1]
    assert len(mine.cloud.buckets) == 4 and words(mine) == ["stack output --json"]


def test_the_bucket_of_another_cluster_of_the_name_is_not_touched(mine: Site) -> None:
    identity, google = "0123456789abcdef", mine.google()
    labels = KEPT | {"tileforge-identity": identity}
    mine.cloud.add_bucket("theirs-results", labels=labels)
    with pytest.raises(ConfigError, match=f"have the identity {identity} of a different"):
        find_bucket(google, "theirs-results", cluster="mine", own=Ownership(cluster="mine"))
    own = Ownership(cluster="mine", identities=frozenset({identity}))
    assert find_bucket(google, "theirs-results", cluster="mine", own=own).num_objects == 0


def test_a_bucket_that_stays_is_exit_60(
    mine: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = "Object 'runs/a b/model.safetensors' is subject to a retention policy"
    mine.cloud.faults.append(
        Fault(path="/o/", method="DELETE", status=403, message=refused, times=99)
    )
    monkeypatch.setattr("sys.stdin", Answers(f"{OLD}\n"))
    assert main([*DOWN, OLD], mine.env) == ExitCode.TEARDOWN
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the cluster was destroyed, but not its bucket" in last and refused in last


def test_down_and_sweep_list_the_old_bucket_as_kept(mine: Site, capsys: Capture) -> None:
    mine.cloud.buckets = [each for each in mine.cloud.buckets if each["name"] != "mine-photos"]
    assert main(["down", "--yes"], mine.env) == ExitCode.OK
    assert f"kept with its results: gs://{OLD}" in capsys.readouterr().err
    options = ("--cluster", "mine", "--project", PROJECT, "--delete", "--yes")
    assert main(["sweep", *options], mine.env) == ExitCode.OK
    out, err = capsys.readouterr()
    assert f"kept with its results: gs://{OLD}" in err and "kept, with results" in out
    assert len(mine.cloud.buckets) == 3
