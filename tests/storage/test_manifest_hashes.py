"""A user with write access to a store cannot replace a checkpoint of the head."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from payload.config.store_address import parse_store_address
from payload.core.file_hash import sha256_of
from payload.formats.checkpoint_listing import MANIFEST_FILE
from payload.orchestrate.runs.run_index import collect_from_store
from payload.run_record.checkpoint_manifest_hashes import (
    HASHES_FILE,
    MOST_HASHES,
    known_hashes,
    note_hash,
)
from payload.run_record.run_files import RunPaths
from payload.storage.checkpoints import Upload, fetch_newest, whole_checkpoints
from payload.storage.objects import ObjectStore, StoredObject, StoreError
from payload.storage.opening import open_store
from payload.storage.restore import restore
from tests.storage.folders import content_of, write_checkpoint
from tests.storage.uploading import upload_all
from tests.support.identities import write_identity

CHECKED = "its manifest matches the hash that the head wrote"
UNKNOWN = "not verified: this machine has no hash of its manifest from the head"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(parse_store_address(str(tmp_path / "store")).under("r"))


@pytest.fixture
def head(tmp_path: Path, store: ObjectStore) -> RunPaths:
    """The head's folder; of its five checkpoints the store has the last two."""
    paths = run_at(tmp_path / "head")
    for step in range(1, 6):
        write_checkpoint(paths.checkpoints, step, seed=0)
        shutil.rmtree(paths.checkpoint(step - 2), ignore_errors=True)  # as the trainer does
        upload_all(paths, store, is_new=step == 1)
    assert whole_checkpoints(store) == ["step_00000004", "step_00000005"]
    return paths


def run_at(folder: Path, *, hashes_of: RunPaths | None = None) -> RunPaths:
    """Make a folder of the run, with the hashes of another folder."""
    paths = write_identity(RunPaths(folder / "r"))
    paths.config.write_text("")
    if hashes_of is not None:
        shutil.copy(hashes_of.manifest_hashes, paths.manifest_hashes)
    return paths


def plant(store: ObjectStore, folder: Path, *steps: int) -> None:
    """Replace the checkpoints of these steps by another user's valid checkpoints."""
    for step in steps:
        upload = Upload(write_checkpoint(folder, step, seed=666))
        upload.send(store, may_write=lambda: None)
        upload.close()


def manifest_of(folder: Path) -> str:
    return sha256_of(folder / MANIFEST_FILE)


@pytest.mark.parametrize("way", ["collect", "resume"])
def test_a_planted_checkpoint_is_refused_with_both_hashes_and_an_older_one_taken(
    head: RunPaths, store: ObjectStore, tmp_path: Path, way: str
) -> None:
    """The attack: a worker's token replaced the newest checkpoint by one with a manifest."""
    plant(store, tmp_path / "planted", 5)
    here = run_at(tmp_path / "here", hashes_of=head)
    said: list[str] = []
    bring = collect_from_store if way == "collect" else restore
    found = bring(store, here, say=said.append)
    assert found == here.checkpoint(4)
    assert content_of(found) == content_of(head.checkpoint(4))
    assert not here.checkpoint(5).exists()
    wrote = manifest_of(head.checkpoint(5))
    planted = manifest_of(tmp_path / "planted" / "step_00000005")
    (refusal,) = [line for line in said if "step_00000005 in the store is skipped" in line]
    assert wrote in refusal and planted in refusal
    assert sum(CHECKED in line for line in said) == 1 and CHECKED in said[-1]
    assert not any(UNKNOWN in line for line in said)


@pytest.mark.parametrize("name", ["step_00000003", "step_000000004"])
@pytest.mark.parametrize("way", ["collect", "resume"])
def test_a_planted_checkpoint_that_the_head_never_wrote_is_not_taken(
    store: ObjectStore, tmp_path: Path, way: str, name: str
) -> None:
    """The attack: a new step, or another name of a step, beside the head's damaged newest one."""
    head = run_at(tmp_path / "head")
    for step in (2, 4):
        write_checkpoint(head.checkpoints, step, seed=0)
        upload_all(head, store, is_new=step == 2)
    planted = write_checkpoint(tmp_path / "planted", 3, seed=666)
    upload = Upload(planted.rename(planted.with_name(name)))
    upload.send(store, may_write=lambda: None)
    upload.close()
    store.put("checkpoints/step_00000004/config.json", io.BytesIO(b"spoilt"), size=6)
    here = run_at(tmp_path / "here", hashes_of=head)
    said: list[str] = []
    bring = collect_from_store if way == "collect" else restore
    found = bring(store, here, say=said.append)
    assert found == here.checkpoint(2) and content_of(found) == content_of(head.checkpoint(2))
    assert [each.name for each in here.checkpoints.iterdir()] == ["step_00000002"]
    assert CHECKED in said[-1] and not any(UNKNOWN in line for line in said)
    refused = any("another machine has added it" in line for line in said)
    assert refused is (name == "step_00000003")


def test_where_every_checkpoint_is_planted_nothing_is_taken(
    head: RunPaths, store: ObjectStore, tmp_path: Path
) -> None:
    plant(store, tmp_path / "planted", 4, 5)
    here = run_at(tmp_path / "here", hashes_of=head)
    assert collect_from_store(store, here, say=lambda line: None) is None
    with pytest.raises(StoreError, match="all checkpoints are damaged"):
        restore(store, here, say=lambda line: None)
    assert list(here.checkpoints.glob("step_*")) == []
    # A checkpoint that the head has removed cannot return with other content.
    plant(store, tmp_path / "again", 1)
    assert collect_from_store(store, here, say=lambda line: None) is None


def test_a_step_that_is_trained_again_after_a_resume_is_no_false_alarm(
    head: RunPaths, store: ObjectStore, tmp_path: Path
) -> None:
    second = run_at(tmp_path / "second", hashes_of=head)
    said: list[str] = []
    assert restore(store, second, say=said.append) == second.checkpoint(5)
    shutil.rmtree(second.checkpoint(5))  # as if the disk had lost it
    assert collect_from_store(store, second, say=said.append) == second.checkpoint(5)
    shutil.rmtree(second.checkpoint(5))
    write_checkpoint(second.checkpoints, 5, seed=1)
    state, _ = upload_all(second, store)
    assert state.is_drained
    here = run_at(tmp_path / "here", hashes_of=second)
    found = collect_from_store(store, here, say=said.append)
    assert found is not None and content_of(found) == content_of(second.checkpoint(5))
    assert known_hashes(here).by_name().keys() == {f"step_{step:08d}" for step in range(1, 6)}
    assert [line for line in said if "is skipped" in line or UNKNOWN in line] == []
    # A machine that has not seen the second attempt is warned, and gets the agreed one.
    late = run_at(tmp_path / "late", hashes_of=head)
    found = collect_from_store(store, late, say=said.append)
    assert found == late.checkpoint(4)
    assert any("--runs-dir" in line for line in said)


def test_a_second_operator_and_an_older_run_go_on_with_a_line(
    head: RunPaths, store: ObjectStore, tmp_path: Path
) -> None:
    for name, known in (("second operator", None), ("behind", head)):
        here = run_at(tmp_path / name, hashes_of=known)
        said: list[str] = []
        if known is not None:  # its last view of the run had one checkpoint
            here.manifest_hashes.unlink()
            note_hash(here, "step_00000001", "0" * 64)
        for bring in (collect_from_store, restore):
            found = bring(store, here, say=said.append)
            assert found is not None and content_of(found) == content_of(head.checkpoint(5))
            assert sum(UNKNOWN in line for line in said) == 1
            assert ("its last hash from the head is of step_00000001" in said[-1]) is (
                known is head
            )
            shutil.rmtree(here.checkpoints)
            said.clear()
    with pytest.raises(FileNotFoundError):
        run_at(tmp_path / "second operator").manifest_hashes.read_bytes()


def test_a_planted_checkpoint_that_came_before_its_hash_is_named_later(
    head: RunPaths, store: ObjectStore, tmp_path: Path
) -> None:
    plant(store, tmp_path / "planted", 5)
    here = run_at(tmp_path / "here")
    said: list[str] = []
    assert collect_from_store(store, here, say=said.append) == here.checkpoint(5)
    assert UNKNOWN in said[-1]
    shutil.copy(head.manifest_hashes, here.manifest_hashes)
    collect_from_store(store, here, say=said.append)
    wrote = manifest_of(head.checkpoint(5))
    assert f"{here.checkpoint(5)} was already on this machine" in said[-1] and wrote in said[-1]


def test_a_planted_checkpoint_that_the_head_has_not_uploaded_is_named(
    head: RunPaths, store: ObjectStore, tmp_path: Path
) -> None:
    plant(store, tmp_path / "planted", 5)
    here = run_at(tmp_path / "here")
    said: list[str] = []
    collect_from_store(store, here, say=said.append)
    for name in ("step_00000001", "step_00000009"):
        note_hash(here, name, "0" * 64)
    collect_from_store(store, here, say=said.append)
    found = f"{here.checkpoint(5)} was already on this machine, but the head has not uploaded this"
    assert any(found in line for line in said)


def test_an_upload_brings_no_part_of_a_removed_run_back(
    head: RunPaths, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(head.checkpoints, 6, seed=0)
    entries = store.entries

    def removing(prefix: str = "") -> list[StoredObject]:
        if prefix == "checkpoints/step_00000006/":  # its files are already open
            shutil.rmtree(head.root)
        return entries(prefix)

    monkeypatch.setattr(store, "entries", removing)
    with pytest.raises(AssertionError):  # storage.json no longer exists
        upload_all(head, store)
    assert not head.root.exists()


def test_what_a_head_has_brought_from_the_store_is_not_of_its_own_writing(
    head: RunPaths, store: ObjectStore, tmp_path: Path
) -> None:
    """Otherwise a head that restores a planted checkpoint would record its hash."""
    plant(store, tmp_path / "planted", 6)
    second = run_at(tmp_path / "second", hashes_of=head)
    assert restore(store, second, say=lambda line: None) == second.checkpoint(6)
    write_checkpoint(second.checkpoints, 7, seed=0)
    upload_all(second, store)
    assert known_hashes(second).by_name().keys() - known_hashes(head).by_name().keys() == {
        "step_00000007"
    }


def test_a_hash_is_noted_while_the_store_has_no_other_manifest_of_that_name(
    head: RunPaths, store: ObjectStore, tmp_path: Path
) -> None:
    """Otherwise the checkpoint of a head that is lost at this moment would be refused."""
    upload = Upload(write_checkpoint(tmp_path / "again", 5, seed=1))
    noted: list[tuple[str, str]] = []

    def note(name: str, sha256: str) -> None:
        stored = fetch_newest(store, tmp_path / f"{len(noted)}", passed_over=lambda name, why: None)
        assert stored is not None
        assert (stored.name, manifest_of(stored)) != (name, manifest_of(head.checkpoint(5)))
        noted.append((name, sha256))

    for _ in range(2):  # the second upload finds all files
        upload.send(store, may_write=lambda: None, note_hash=note)
    upload.close()
    assert noted == [("step_00000005", manifest_of(tmp_path / "again" / "step_00000005"))] * 2


def test_the_hashes_neither_leave_for_the_store_nor_grow_without_end(
    head: RunPaths, store: ObjectStore
) -> None:
    assert HASHES_FILE not in {entry.name for entry in store.entries()}
    for step in range(MOST_HASHES + 3):
        if step > MOST_HASHES - 3:
            note_hash(head, f"step_{step:08d}", f"{step:064x}")
    assert len(known_hashes(head).hashes) <= MOST_HASHES
    head.manifest_hashes.write_text("{")
    assert known_hashes(head).by_name() == {}
    note_hash(head, "step_00000009", "9" * 64)
    assert known_hashes(head).by_name() == {"step_00000009": "9" * 64}
