"""Records of a cluster that came with a cloned folder prove nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from infra.gcp.labels import program_identity
from payload.core.errors import ConfigError, ExitCode
from payload.core.files import write_whole
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.gcp.project_choice import project_of
from payload.orchestrate.commands.cluster_name_conflict import own_identity
from payload.stack.cluster_identity import (
    accept_cluster_identity,
    known_cluster_identity,
    recorded_cluster_identity,
    resolve_cluster_identity,
)
from payload.stack.operator_key_file import make_operator_key
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.stacks import Answers, Capture, own_key
from tests.orchestrate.cloud.standin import PROJECT, REGION
from tests.support.identities import CLUSTER, cluster_labels

pytestmark = pytest.mark.processes


def planted(site: Site) -> None:
    """Return a folder with the records of a running cluster, as in a clone."""
    site.cloud.add_node("mine-0", labels=cluster_labels("mine", expires=1_900_000_000))
    shutil.rmtree(site.folder / ".cluster")
    own = site.folder / ".cluster" / "mine"
    write_whole(own / "identity.json", json.dumps({"identity": CLUSTER, "schema_version": 1}))
    known = {"cluster": "mine", "project": PROJECT, "region": REGION, "node_usd": {"mine-0": 0.5}}
    write_whole(own / "stack.json", json.dumps({"schema_version": 1, **known}))


def count(site: Site) -> int:
    return sum(map(len, site.cloud.items.values()))


def test_records_that_came_with_a_folder_prove_nothing(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(site)
    before = count(site)
    words = ["sweep", "--cluster", "mine", "--project", PROJECT]
    # There is no terminal, and --yes does not confirm it.
    assert main([*words, "--delete", "--yes"], site.env) == ExitCode.USAGE
    assert "Answer this question at a terminal; --yes does not answer" in capsys.readouterr().err
    assert main(words, site.env) == ExitCode.TEARDOWN
    err = capsys.readouterr().err
    assert "was built from another folder" in err and "remove with" not in err
    assert count(site) == before
    # A cluster of an older version: its name must be typed once.
    monkeypatch.setattr("sys.stdin", Answers("mine\n"))
    main([*words, "--delete", "--yes"], site.env)
    assert count(site) == 0


def test_up_and_down_ask_once_whose_cluster_it_is(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(site)
    own = site.folder / ".cluster" / "mine" / "identity.json"
    site.pulumi.on("stack", "export", out="{}")
    site.pulumi.on("stack", "output", "--json", out="{}")
    own_key(site)
    for words in (["up", "--yes"], ["down", "--yes"]):
        assert main(words, site.env) == ExitCode.USAGE
        assert "but the file was not written on this machine" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Answers("no\n"))
    assert main(["down", "--yes"], site.env) == ExitCode.CONFIG
    assert known_cluster_identity(site.folder, "mine") is None
    monkeypatch.setattr("sys.stdin", Answers("mine\n"))
    assert own_identity(site.folder, "mine") == CLUSTER
    assert known_cluster_identity(site.folder, "mine") == CLUSTER
    monkeypatch.undo()
    assert own_identity(site.folder, "mine") == CLUSTER, "asked once"
    # The proof is bound to this folder and name, so a copy in another folder proves nothing.
    for folder, name in ((site.folder / "copy", "mine"), (site.folder, "other")):
        path = folder / ".cluster" / name / "identity.json"
        write_whole(path, own.read_text())
        assert known_cluster_identity(folder, name) is None
        assert recorded_cluster_identity(folder, name) == (CLUSTER, False)


def test_the_stacks_state_proves_what_a_folder_says(tmp_path: Path) -> None:
    path = tmp_path / ".cluster" / "dev" / "identity.json"
    write_whole(path, json.dumps({"identity": CLUSTER, "schema_version": 1}))
    assert resolve_cluster_identity(tmp_path, "dev") == CLUSTER
    assert known_cluster_identity(tmp_path, "dev") is None
    assert own_identity(tmp_path, "dev", state_identities=[CLUSTER]) == CLUSTER
    assert known_cluster_identity(tmp_path, "dev") == CLUSTER


def test_the_program_builds_nothing_with_an_identity_that_came_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".cluster" / "dev" / "identity.json"
    write_whole(path, json.dumps({"identity": CLUSTER, "schema_version": 1}))
    monkeypatch.setattr("infra.gcp.labels.pulumi.get_stack", lambda: "dev")
    monkeypatch.setattr("infra.gcp.labels.pulumi.runtime.is_dry_run", lambda: True)
    assert program_identity(tmp_path, "dev") == CLUSTER
    monkeypatch.setattr("infra.gcp.labels.pulumi.runtime.is_dry_run", lambda: False)
    with pytest.raises(ConfigError, match="nothing on this machine proves"):
        program_identity(tmp_path, "dev")
    accept_cluster_identity(tmp_path, "dev")
    assert program_identity(tmp_path, "dev") == CLUSTER


def test_the_environments_project_goes_before_the_folders(site: Site, capsys: Capture) -> None:
    planted(site)
    env = {"GOOGLE_CLOUD_PROJECT": "my-own"}
    assert project_of(None, "mine", env, folder=site.folder) == "my-own"
    assert f"cluster mine of this folder is in {PROJECT}" in capsys.readouterr().err
    assert project_of(None, "mine", {}, folder=site.folder) == PROJECT


@pytest.mark.parametrize("has_private", [True, False])
def test_up_trusts_no_public_key_that_came_with_the_folder(
    has_private: bool, site: Site, capsys: Capture
) -> None:
    folder = site.folder / ".cluster" / "mine"
    if has_private:
        own_key(site)
    write_whole(folder / "id_ed25519.pub", f"{make_operator_key(site.folder / 'theirs')}\n")
    assert main(["up", "--yes"], site.env) == ExitCode.CONFIG
    assert "is missing, so the key may belong to another user" in capsys.readouterr().err
