"""Attacks by links in a run's folder and in a project's `.cluster`: no link is followed out."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from payload.config.run_config import load_run_config
from payload.config.store_address import parse_store_address
from payload.core.errors import CheckpointError, ConfigError, DataError, ExitCode
from payload.core.file_hash import sha256_of
from payload.data.tokenizers import load_tokenizer
from payload.formats.checkpoint_listing import checkpoint_folders, newest_valid
from payload.orchestrate.__main__ import main
from payload.orchestrate.runs.run_index import collect_from_store
from payload.orchestrate.ssh.cluster import operator_key
from payload.report.__main__ import main as report
from payload.report.source import Run
from payload.report.track import track
from payload.run_record.approved_settings import record_approved
from payload.run_record.run_files import RunPaths, require_own_folders
from payload.run_record.run_identity import known_identity
from payload.run_record.run_lock import is_supervised
from payload.run_record.run_repair import move_blockers_aside
from payload.storage.__main__ import main as storage
from payload.storage.checkpoints import fetch_checkpoint
from payload.storage.opening import open_store
from payload.storage.records import Records
from payload.weights.source import find_source
from tests.orchestrate.test_keys import make_cluster
from tests.storage.folders import write_checkpoint
from tests.storage.test_links import contents
from tests.storage.uploading import upload_all
from tests.support.data_folders import make_data_folder
from tests.support.identities import MINE, write_identity
from tests.support.run_folders import make_run

pytestmark = pytest.mark.processes  # planning a run starts its launcher


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Another folder of this user, with all kinds of files that a run has."""
    folder = tmp_path / "victim"
    for name in ("rank_0000.log", "operators.json", "metrics.csv", "known_hosts", "id_ed25519"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("private")
    write_checkpoint(folder, 9, seed=0)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run of unknown origin, with a checkpoint."""
    paths = write_identity(make_run(tmp_path / "runs" / "demo", settings=["track.to=csv"]))
    write_checkpoint(paths.checkpoints, 3, seed=1)
    return paths


def put_link(link: Path, target: Path) -> None:
    if link.is_dir():
        link.rename(link.with_name(f"{link.name}.before"))
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


@pytest.mark.parametrize("place", ["logs", "profile"])
def test_a_linked_folder_is_not_uploaded(
    place: str, run: RunPaths, victim: Path, tmp_path: Path
) -> None:
    """The attack: every file of the folder was uploaded to the store."""
    put_link(run.root / place, victim)
    store = open_store(parse_store_address(str(tmp_path / "store")).under("demo"))
    Records(run).send(store, all_of_them=True)
    names = [entry.name for entry in store.entries()]
    assert "run.toml" in names and not [name for name in names if name.startswith(f"{place}/")]


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/step_00000009", "checkpoints/best"])
def test_a_linked_checkpoint_is_no_checkpoint_of_the_run(
    place: str, run: RunPaths, victim: Path
) -> None:
    """The attack: `export` and the weights for a head came from another folder."""
    is_all = place == "checkpoints"
    put_link(run.root / place, victim if is_all else victim / "step_00000009")
    own = None if is_all else run.checkpoint(3)
    assert checkpoint_folders(run.checkpoints) == ([] if own is None else [own])
    assert run.newest_checkpoint() == newest_valid(run.checkpoints) == own
    named = run.root / place / "step_00000009" if is_all else run.root / place
    for name in (named, *([run.root, run.checkpoints] if is_all else [])):
        for verify in (True, False):
            with pytest.raises(CheckpointError, match="leads out of its folder"):
                find_source(str(name), setting="--checkpoint", verify=verify)
    with pytest.raises(DataError, match="leads out of its folder"):
        load_tokenizer(str(named))
    if own is not None:
        assert find_source(str(run.root), setting="--checkpoint").folder == own


def test_best_leads_to_a_checkpoint_beside_it_and_a_run_s_folder_may_be_a_link(
    run: RunPaths, tmp_path: Path
) -> None:
    """The user's own links still work: to the run's folder, and to the runs folder."""
    (run.checkpoints / "best").symlink_to("step_00000003")
    (tmp_path / "disk").symlink_to(run.root.parent)
    (tmp_path / "mine").symlink_to(run.root)
    for root in (tmp_path / "disk" / "demo", tmp_path / "mine"):
        require_own_folders(RunPaths(root))
        for name in (root, root / "checkpoints", root / "checkpoints" / "best"):
            folder = find_source(str(name), setting="--checkpoint").folder
            assert folder is not None and folder.resolve() == run.checkpoint(3).resolve()
    (run.checkpoints / "best").unlink()
    (run.checkpoints / "best").symlink_to("../other/step_00000009")
    write_checkpoint(run.root / "other", 9, seed=0)
    with pytest.raises(CheckpointError, match="does not lead to a checkpoint in its folder"):
        find_source(str(run.checkpoints / "best"), setting="--checkpoint")


def test_a_link_to_a_file_is_set_aside_by_a_resume(run: RunPaths, victim: Path) -> None:
    for name in ("samples.json", "profile/operators.json"):
        put_link(run.root / name, victim / "operators.json")
    assert len(move_blockers_aside(run)) == 2
    assert not os.path.lexists(run.root / "samples.json") and not list(run.profile.glob("*.json"))


@pytest.mark.parametrize("place", ["checkpoints", "restored", "track/csv", "logs", "profile"])
def test_a_resume_in_a_folder_with_a_linked_folder_is_refused(
    place: str, run: RunPaths, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attack: a resumed run wrote into another folder, even that of another run."""
    put_link(run.root / place, victim)
    before = contents(victim)
    words = ["run", "--resume", "demo", "--inventory", "local", "--runs-dir", str(run.root.parent)]
    assert main(words, os.environ) == ExitCode.CONFIG
    assert f"{run.root / place} is a link" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ConfigError, match="is a link"):
        move_blockers_aside(run)  # as on a node
    assert contents(victim) == before


@pytest.mark.parametrize("place", ["track", "track/csv", "track/csv/metrics.csv", "track/.lock"])
def test_a_tracker_writes_through_no_link(place: str, run: RunPaths, victim: Path) -> None:
    """The attack: `report --track` wrote its table and its settings into another folder."""
    put_link(run.root / place, victim / "metrics.csv" if "." in place else victim)
    before = contents(victim)
    with pytest.raises(ConfigError, match="leads out of the run's folder"):
        track(Run(run), live=False, say=lambda _: None)
    assert contents(victim) == before


def test_collect_brings_no_checkpoint_through_a_link(
    run: RunPaths, victim: Path, tmp_path: Path
) -> None:
    store = open_store(parse_store_address(str(tmp_path / "store")).under("demo"))
    upload_all(run, store, is_new=True)
    for path in (run.inventory, run.named):
        path.unlink(missing_ok=True)
    put_link(run.checkpoints, victim)
    before = contents(victim)
    with pytest.raises(ConfigError, match="is a symlink"):
        collect_from_store(store, run, say=lambda _: None)
    assert contents(victim) == before


def test_a_person_s_upload_and_restore_need_own_folders_and_a_named_store(
    run: RunPaths, victim: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attacks: a checkpoint came through a link, and run.toml caused writes to any folder."""
    results = tmp_path / "store"
    settings = load_run_config(run.config, overrides=[f"storage.results={results}"])
    run.config.write_text(settings.to_toml(), encoding="utf-8")
    words = ["--run-dir", str(run.root)]
    for verb in ("upload", "restore"):
        assert storage([verb, *words]) == ExitCode.CONFIG
        said = " ".join(capsys.readouterr().err.split())
        assert f"--set storage.results={results}" in said and not results.exists()
    store = open_store(parse_store_address(str(results)).under("demo"))
    upload_all(run, store, is_new=True)
    put_link(run.checkpoints, victim)
    before = contents(victim)
    for more in (["--set", f"storage.results={results}"], ["--started-here"]):
        for verb in ("upload", "restore"):
            assert storage([verb, *words, *more]) == ExitCode.CONFIG
            assert "is a link" in capsys.readouterr().err
    assert contents(victim) == before
    run.checkpoints.unlink()
    assert storage(["restore", *words, "--set", f"storage.results={results}"]) == ExitCode.OK
    record_approved(run, {"storage.results": str(results)})
    assert storage(["restore", *words]) == ExitCode.OK


def test_a_linked_log_is_not_printed_and_a_pipe_does_not_hold_an_upload(
    run: RunPaths, victim: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attacks: `logs` printed any file, and an upload waited forever."""
    put_link(run.rank_log(0), victim / "rank_0000.log")
    words = ["logs", "demo", "--runs-dir", str(run.root.parent)]
    assert main(words, os.environ) == ExitCode.CONFIG
    said = capsys.readouterr()
    assert "Links are not followed" in " ".join(said.err.split()) and "private" not in said.out
    run.rank_log(0).unlink()
    put_link(run.logs, victim)
    assert main(words, os.environ) == ExitCode.CONFIG
    run.logs.unlink()
    run.logs.mkdir()
    os.mkfifo(run.rank_log(0))
    store = open_store(parse_store_address(str(tmp_path / "store")).under("demo"))
    Records(run).send(store, all_of_them=True)
    assert "run.toml" in [entry.name for entry in store.entries()]


def test_a_store_s_checkpoint_consists_of_data_alone(run: RunPaths, tmp_path: Path) -> None:
    """The attack: a manifest of a store listed sitecustomize.py, and `collect` downloaded it."""
    manifest = run.checkpoint(3) / "manifest.json"
    listed = json.loads(manifest.read_text())
    code = run.checkpoint(3) / "sitecustomize.py"
    code.write_text("raise SystemExit")
    listed["files"][code.name] = {"bytes": 16, "sha256": sha256_of(code)}
    manifest.write_text(json.dumps(listed))
    store = open_store(parse_store_address(str(tmp_path / "store")).under("demo"))
    upload_all(run, store, is_new=True)
    path = "/demo/checkpoints/step_00000003/manifest.json"
    words = rf"^{tmp_path}/store{path}: lists 'sitecustomize\.py', which is not a checkpoint file"
    with pytest.raises(CheckpointError, match=words):
        fetch_checkpoint(store, "step_00000003", tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_dangling_lock_makes_no_file_elsewhere(run: RunPaths, tmp_path: Path) -> None:
    """The attack: `remove` created an empty file at the target of the link."""
    run.lock.symlink_to(tmp_path / "new")
    assert not is_supervised(run)
    os.utime(run.root, (1, 1))
    words = ["remove", "demo", "--yes", "--runs-dir", str(run.root.parent)]
    assert main(words, os.environ) == ExitCode.OK
    assert not run.root.exists() and not (tmp_path / "new").exists()


def test_a_report_reads_the_data_that_somebody_named_for_the_run(tmp_path: Path) -> None:
    """The attack: the settings in a run folder made the page show any meta.json of this machine."""
    data = make_data_folder(tmp_path / "data")
    paths = write_identity(make_run(tmp_path / "demo", settings=[f"data.dir={data}"]))
    assert Run(paths).data is None
    assert Run(paths, is_started_here=True).data is not None
    record_approved(paths, {"data.dir": load_run_config(paths.config).data.dir})
    assert Run(paths).data is not None


@pytest.mark.parametrize("place", [".cluster", ".cluster/c", ".cluster/c/id_ed25519"])
@pytest.mark.parametrize("given", [None, Path("/key")])
def test_no_file_of_a_cluster_is_written_or_read_through_a_link(
    place: str, given: Path | None, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: `preflight` in a cloned project replaced ~/.ssh/known_hosts."""
    monkeypatch.chdir(tmp_path)
    (victim / "c").mkdir()
    put_link(tmp_path / place, victim / "id_ed25519" if place.endswith("9") else victim)
    before = contents(victim)
    with pytest.raises(ConfigError, match=f"{place} is a symlink"):
        operator_key(replace(make_cluster(), cluster="c"), given=given)
    assert contents(victim) == before


def test_the_run_that_a_checkpoint_is_of_is_not_told_by_a_link(run: RunPaths, victim: Path) -> None:
    put_link(run.checkpoint(9), victim / "step_00000009")
    run.identity.unlink()
    assert known_identity(run).identity == MINE.identity


@pytest.mark.parametrize("place", ["runs/latest", "latest"])
def test_the_link_latest_leads_to_no_folder_elsewhere(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attack: in a cloned project, `report` replaced the report of another folder."""
    elsewhere, project = tmp_path / "elsewhere", tmp_path / "project"
    for folder in (elsewhere, project / "runs"):
        folder.mkdir(parents=True)
    (elsewhere / "metrics.jsonl").write_text("")
    (elsewhere / "report.html").write_text("mine")
    monkeypatch.chdir(project)
    put_link(project / place, elsewhere)
    for arguments in ([], ["latest"], ["--track"]):
        assert report(arguments) == ExitCode.USAGE
        assert "no runs in " in capsys.readouterr().err
    assert sorted(path.name for path in elsewhere.iterdir()) == ["metrics.jsonl", "report.html"]
    assert (elsewhere / "report.html").read_text() == "mine"
    # A run in the folder of runs is found, by a link of any form.
    make_run(project / "runs" / "elsewhere")
    assert report(["latest"]) == (ExitCode.OK if place == "runs/latest" else ExitCode.USAGE)
    assert (elsewhere / "report.html").read_text() == "mine"
