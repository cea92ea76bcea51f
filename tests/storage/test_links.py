"""Attacks with symlinks and pipes in a shared folder: a store stays inside its folder."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from payload.config.store_address import StoreAddress, parse_store_address
from payload.core.errors import ConfigError, DataError, ExitCode, PreflightError
from payload.run_record.metrics_log import EvalMetrics, to_json_line
from payload.run_record.run_files import RunPaths
from payload.run_record.run_identity import RunIdentity
from payload.storage.__main__ import main
from payload.storage.checkpoints import fetch_newest, remove_checkpoints, stored_manifests
from payload.storage.data import fetch_data
from payload.storage.folder import FolderStore
from payload.storage.objects import (
    SMALL_BYTES,
    ObjectStore,
    StoredObject,
    StoreError,
    StoreRefusedError,
)
from payload.storage.owner import stored_identity
from payload.storage.records import fetch_records
from payload.storage.restore import fetch_run, restore
from payload.storage.store_access import run_address
from tests.storage.folders import write_checkpoint
from tests.support.identities import MINE, THEIRS, write_identity
from tests.test_metrics_log import step_line

SECRET = b"a private key"


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """A folder that several users can write to."""
    (tmp_path / "team").mkdir()
    return tmp_path / "team"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Another user's folder, with a file and a checkpoint."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "key").write_bytes(SECRET)
    (folder / "run.toml").write_bytes(SECRET)
    write_checkpoint(folder / "checkpoints", 5, seed=0)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def put(store: ObjectStore, name: str) -> StoredObject:
    return store.put(name, io.BytesIO(b"ours"), size=4)


def test_a_link_in_the_lock_s_place_is_refused_and_its_target_stays(
    team: Path, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (team / ".lock").symlink_to(victim / "key")
    assert main(["check", str(team)]) == ExitCode.CONFIG
    assert f"{team / '.lock'} is a symlink" in capsys.readouterr().err
    assert (victim / "key").read_bytes() == SECRET


Attack = Callable[[ObjectStore], object]


@pytest.mark.parametrize("place", ["exp1", "exp1/checkpoints", "exp1/logs"])
@pytest.mark.parametrize(
    "attack",
    [
        lambda store: put(store, "checkpoints/step_00000005/manifest.json"),
        lambda store: put(store, "logs/rank_0000.log"),
        lambda store: remove_checkpoints(store, keep=(), may_write=lambda: None),
        lambda store: store.remove("checkpoints/step_00000005/manifest.json"),
        lambda store: store.tidy(),
    ],
)
def test_a_linked_folder_leads_to_no_write_elsewhere(
    team: Path, victim: Path, place: str, attack: Attack
) -> None:
    before = contents(victim)
    link = team / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victim / "checkpoints" if place.endswith("checkpoints") else victim)
    store = FolderStore(StoreAddress(None, str(team)).under("exp1"))
    try:
        attack(store)
    except StoreRefusedError as error:
        assert "is a symlink" in str(error)
    assert contents(victim) == before


@pytest.mark.parametrize("place", ["exp1", "exp1/logs", "exp1/run.toml"])
def test_a_linked_folder_or_file_is_not_read(
    team: Path, victim: Path, place: str, tmp_path: Path
) -> None:
    link = team / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victim / "run.toml" if place.endswith(".toml") else victim)
    store = FolderStore(run_address(f"{team}/exp1"))
    is_run = link.name != "exp1"
    assert ("exp1" in FolderStore(StoreAddress(None, str(team))).groups()) == is_run
    try:
        entries = store.entries()
        fetch_records(store, tmp_path / "copy")
        copy = tmp_path / "copy" / "checkpoints"
        assert fetch_newest(store, copy, passed_over=lambda *_: None) is None
    except StoreRefusedError as error:
        assert not is_run and "is a symlink" in str(error)
    else:
        assert entries == []
    with pytest.raises(StoreRefusedError, match="is a symlink"):
        store.read("logs/key" if place.endswith("logs") else "run.toml")
    assert SECRET not in contents(tmp_path / "copy").values()


def test_a_pipe_in_a_file_s_place_holds_nobody_up(team: Path) -> None:
    os.mkfifo(team / "run.toml")
    os.mkfifo(team / ".lock")
    store = FolderStore(StoreAddress(None, str(team)))
    assert store.entries() == []
    with pytest.raises(StoreRefusedError, match="is not a regular file"):
        store.read("run.toml")
    with pytest.raises(StoreError):
        put(store, "logs/a")


def test_a_link_that_a_person_named_is_followed(team: Path, tmp_path: Path) -> None:
    (tmp_path / "mounted").symlink_to(team)
    address = parse_store_address(str(tmp_path / "mounted"))
    put(FolderStore(address.under("exp1")), "logs/a")
    assert (team / "exp1" / "logs" / "a").read_bytes() == b"ours"


def test_a_name_that_leads_elsewhere_is_no_object_s(team: Path) -> None:
    store = FolderStore(StoreAddress(None, str(team)))
    for name in ("../x", "a/../../x", "/etc/x", "a//b", "", ".lock", "a\0b"):
        with pytest.raises(StoreError, match="is not a valid object name"):
            put(store, name)
        with pytest.raises(StoreError, match="is not a valid object name"):
            store.read(name)


def test_a_name_with_an_escape_sequence_reaches_no_terminal(
    team: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (team / "exp\x1b]0;owned\x07\x9b2J1").mkdir()
    assert main(["list", str(team)]) == ExitCode.OK
    assert capsys.readouterr().out == "exp1\n"


def test_a_name_with_a_line_break_is_no_line_of_its_own(
    team: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (team / "exp1\nerror: run this").mkdir()
    assert main(["list", str(team)]) == ExitCode.OK
    assert capsys.readouterr().out == "exp1 error: run this\n"
    with pytest.raises(ConfigError) as caught:
        fetch_run(FolderStore(run_address(f"{team}/exp2")), RunPaths(tmp_path / "exp2"))
    assert "The store has: exp1 error: run this." in str(caught.value)


def write_vast_checkpoint(checkpoints: Path, step: int) -> None:
    """A checkpoint that claims to be of this run, and does not fit on any disk."""
    folder = write_checkpoint(checkpoints, step, seed=4)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(2**50)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["bytes"] = 2**50
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_that_does_not_fit_ends_a_resume_where_it_is_the_only_one(
    team: Path, tmp_path: Path
) -> None:
    write_vast_checkpoint(team / "exp1" / "checkpoints", 10)
    store = FolderStore(StoreAddress(None, str(team)).under("exp1"))
    with pytest.raises(PreflightError, match=r"needs 1,125,899\.91 GB, .* Free disk space"):
        fetch_newest(store, tmp_path / "here", run=MINE, passed_over=lambda *_: None)
    assert list((tmp_path / "here").iterdir()) == []


def test_huge_and_foreign_objects_keep_no_sound_checkpoint_from_being_brought(
    team: Path, tmp_path: Path
) -> None:
    run = team / "exp1"
    (run / "run.toml").parent.mkdir()
    (run / "run.toml").touch()
    sound = write_checkpoint(run / "checkpoints", 5, seed=0)
    write_checkpoint(run / "checkpoints", 6, seed=1, run=THEIRS)
    write_checkpoint(run / "checkpoints", 7, seed=2, run=RunIdentity())
    for name in ("checkpoints/step_00000009/manifest.json", "owner.json", "identity.json"):
        (run / name).parent.mkdir(exist_ok=True)
        with (run / name).open("wb") as file:
            file.truncate(SMALL_BYTES + 1)
    large = write_checkpoint(run / "checkpoints", 8, seed=3)
    with (large / "trainer.json").open("wb") as file:
        file.truncate(SMALL_BYTES + 1)
    manifest = json.loads((large / "manifest.json").read_text())
    manifest["files"]["trainer.json"]["bytes"] = SMALL_BYTES + 1
    (large / "manifest.json").write_text(json.dumps(manifest))
    write_vast_checkpoint(run / "checkpoints", 10)
    deep = run / "logs"
    for _ in range(300):
        deep.mkdir()
        deep /= "d"
    store = FolderStore(StoreAddress(None, str(team)).under("exp1"))
    said: list[str] = []
    why: list[str] = []

    def pass_over(name: str, problem: str) -> None:
        said.append(name)
        why.append(problem)

    found = fetch_newest(store, tmp_path / "here", run=MINE, passed_over=pass_over)
    assert "another checkpoint of the run needs only" in why[0]
    assert "is too large" in why[2] and "this run has" in why[3]
    assert found is not None and contents(found) == contents(sound)
    assert said == [f"step_{step:08d}" for step in (10, 9, 8, 7, 6)]
    assert sorted(stored_manifests(store)) == [f"step_{step:08d}" for step in (5, 6, 7, 8, 10)]
    there = stored_identity(store)
    assert there is not None and there.identity in (MINE.identity, THEIRS.identity)


@pytest.mark.parametrize("attack", ["nested", "huge", "vast"])
def test_a_best_checkpoint_that_cannot_be_fetched_ends_no_resume(
    attack: str, team: Path, tmp_path: Path
) -> None:
    """The attack: the store's metrics name a best step, whose checkpoint is no checkpoint."""
    run = team / "exp1"
    sound = write_checkpoint(run / "checkpoints", 5, seed=0)
    (run / "run.toml").touch()
    (run / "owner.json").write_text(
        json.dumps({"token": "0", "host": "h", "since_unix": 1.0, "identity": MINE.identity})
    )
    rows = [EvalMetrics(step=step, val_loss=step, val_tokens=1) for step in (3, 5)]
    (run / "metrics.jsonl").write_text("".join(map(to_json_line, rows)) + step_line(5))
    if attack == "nested":
        write_checkpoint(run / "checkpoints" / "x", 3, seed=1)
    elif attack == "vast":
        write_vast_checkpoint(run / "checkpoints", 3)
    else:
        (run / "checkpoints/step_00000003").mkdir()
        with (run / "checkpoints/step_00000003/manifest.json").open("wb") as file:
            file.truncate(SMALL_BYTES + 1)
    here = write_identity(RunPaths(tmp_path / "here" / "exp1"))
    said: list[str] = []
    found = restore(FolderStore(StoreAddress(None, str(team)).under("exp1")), here, say=said.append)
    assert found == here.checkpoint(5) and contents(found) == contents(sound)
    assert "resumes from step_00000005" in said[-1]
    assert [path.name for path in here.checkpoints.iterdir()] == ["step_00000005"]


@pytest.mark.parametrize("name", ["a\0b", "", "..", "a/b", "a\nb", "\x1b[31m", "n" * 300])
def test_data_in_a_bucket_lists_only_names_of_files(name: str, team: Path, tmp_path: Path) -> None:
    """The attack: a NUL in a name ended the command with a traceback."""
    entry = {"bytes": 1, "sha256": "0" * 64}
    (team / "meta.json").write_text(json.dumps({"files": {name: entry}}))
    store = FolderStore(StoreAddress(None, str(team)))
    with pytest.raises(DataError, match="is not a file of a data folder"):
        fetch_data(store, tmp_path / "cache" / "data", say=lambda line: None)
    assert list((tmp_path / "cache").iterdir()) == []
