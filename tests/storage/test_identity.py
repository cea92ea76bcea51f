"""Two runs with the same name: neither is loaded into or overwrites the other."""

from __future__ import annotations

import io
import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from payload.config.run_config import RunConfig, load_run_config
from payload.config.store_address import parse_store_address
from payload.core.errors import ConfigError, ExitCode, UsageError
from payload.orchestrate.__main__ import main
from payload.orchestrate.runs.run_index import collect_from_store, resumable_run
from payload.orchestrate.runs.run_request import RunRequest
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import RunPaths, write_json
from payload.run_record.run_identity import RunIdentity, known_identity
from payload.run_record.store_state import StoreState
from payload.storage.objects import ObjectStore
from payload.storage.opening import open_store
from payload.storage.owner import OWNER, Owner, stored_identity
from payload.storage.restore import restore
from tests.storage.folders import content_of, write_checkpoint
from tests.storage.uploading import upload_all
from tests.support.identities import MINE, THEIRS, write_identity
from tests.support.run_folders import make_run

pytestmark = pytest.mark.processes

NONE = RunIdentity()
TOKEN = "a" * 32


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A store with another user's run of the same name."""
    theirs = make_run(tmp_path / "theirs" / "exp1")
    write_identity(theirs, THEIRS)
    write_checkpoint(theirs.checkpoints, 20, seed=2, run=THEIRS)
    made = store_at(tmp_path / "results" / "exp1")
    upload_all(theirs, made, is_new=True)
    return made


@pytest.fixture
def mine(tmp_path: Path) -> RunPaths:
    """An unrelated run of this machine."""
    results = f"storage.results={tmp_path / 'results'}"
    paths = make_run(tmp_path / "runs" / "exp1", settings=[results], status="stopped")
    write_checkpoint(paths.checkpoints, 10, seed=1, run=MINE)
    return write_identity(paths)


def store_at(folder: Path) -> ObjectStore:
    return open_store(parse_store_address(str(folder)))


def all_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, except locks."""
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in files if path.suffix != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


def resume(named: str, runs: Path) -> RunPaths:
    paths, _ = resumable_run(
        named,
        runs_dir=runs,
        overrides=(),
        settings=RunConfig,
        has_config=False,
        env=os.environ,
        say=lambda line: None,
    )
    return paths


def settle(paths: RunPaths) -> RunIdentity:
    """Prepare a run's folder as a command that resumes it."""
    with ExitStack() as held:
        order = RunRequest(
            paths=paths,
            config=load_run_config(paths.config),
            vocab_size=512,
            resumes=True,
            detach=False,
            grace_s=1.0,
            env=os.environ,
            talk=text_console(stderr=True),
            held=held,
        )
        with order.folder():
            pass
    return known_identity(paths)


def refused(*runs: RunIdentity) -> str:
    """Return a pattern of an error that names both."""
    return ".*".join(run.words() for run in runs)


def test_a_resume_by_address_never_merges_another_run_of_the_name(
    store: ObjectStore, mine: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attack: exit 0, their weights in this run, and the store's run replaced."""
    here, there = all_of(mine.root), all_of(tmp_path / "results")
    words = ["run", "--resume", str(store.address), "--inventory", "local"]
    status = main([*words, "--runs-dir", str(mine.root.parent)], os.environ)
    assert status == ExitCode.CONFIG
    said = " ".join(capsys.readouterr().err.split())
    assert str(MINE.identity) in said and str(THEIRS.identity) in said and "two runs" in said
    assert all_of(mine.root) == here and all_of(tmp_path / "results") == there


@pytest.mark.parametrize("identity", [MINE, NONE])
@pytest.mark.parametrize("owner", [THEIRS, NONE])
def test_every_way_from_a_store_asks_whose_run_it_is(
    store: ObjectStore, mine: RunPaths, tmp_path: Path, identity: RunIdentity, owner: RunIdentity
) -> None:
    """Also if one of them is from an older release and has no identity."""
    shutil.rmtree(mine.checkpoints)
    mine.identity.unlink()
    if identity is not NONE:
        write_identity(mine, identity)
    if owner is NONE:
        make_older(store)
    here, there = all_of(mine.root), all_of(tmp_path / "results")
    words = refused(identity, owner)
    with pytest.raises(ConfigError, match=words):
        restore(store, mine, say=print)
    with pytest.raises(ConfigError, match=words):
        resume(str(store.address), mine.root.parent)
    assert all_of(mine.root) == here
    for own in (mine.inventory, mine.lock):
        own.unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=words):
        collect_from_store(store, mine, say=print)
    state, said = upload_all(mine, store)
    assert state.lost and not state.is_drained and owner.words() in str(state.problem)
    assert all_of(tmp_path / "results") == there
    assert f"warning: {state.problem}" in said


def make_older(store: ObjectStore) -> None:
    """Write the files that an older release would have left in the store."""
    owner = {"token": TOKEN, "host": "laptop", "since_unix": 1.0, "schema_version": 1}
    put(store, OWNER, json.dumps(owner).encode())
    store.remove("identity.json")
    folder = Path(str(store.address)) / "checkpoints"
    shutil.rmtree(folder)
    write_checkpoint(folder, 20, seed=2, run=RunIdentity())


def put(store: ObjectStore, name: str, content: bytes) -> None:
    store.put(name, io.BytesIO(content), size=len(content))


@pytest.mark.parametrize("left", ["owner", "record", "checkpoint"])
def test_whatever_is_left_in_a_store_says_whose_it_is(
    store: ObjectStore, mine: RunPaths, left: str
) -> None:
    """An older version's resume writes owner.json without the identity; files get lost."""
    if left != "owner":
        store.remove(OWNER)
    if left == "checkpoint":
        store.remove("identity.json")
    found = stored_identity(store)
    assert found is not None and found.identity == THEIRS.identity
    state, _ = upload_all(mine, store)
    assert state.lost and THEIRS.words() in str(state.problem)


def test_a_run_is_restored_and_continued_from_its_own_store(
    store: ObjectStore, tmp_path: Path
) -> None:
    paths = resume(str(store.address), tmp_path / "elsewhere")
    assert settle(paths).identity == THEIRS.identity
    found = restore(store, paths, say=print)
    assert found == paths.checkpoint(20)
    write_checkpoint(paths.checkpoints, 30, seed=3, run=THEIRS)
    assert upload_all(paths, store)[0].checkpoint == "step_00000030"
    assert owner_of(store).identity == THEIRS.identity
    assert resume(str(store.address), tmp_path / "elsewhere") == paths


def owner_of(store: ObjectStore) -> Owner:
    return Owner(**json.loads(store.read(OWNER)[0]))


def test_an_older_run_goes_on_in_its_own_folder_and_gets_its_identity(
    store: ObjectStore, mine: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder and its store have the token of the same owner."""
    make_older(store)
    mine.identity.unlink()
    shutil.rmtree(mine.checkpoints)
    write_json(mine.store_state, StoreState(address=str(store.address), token=TOKEN))
    own = settle(mine)
    assert own.identity is not None and own.is_older
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: run exp1 is from an older version" in said and own.identity in said
    assert settle(mine) == own and "older version" not in capsys.readouterr().err
    assert restore(store, mine, say=print) == mine.checkpoint(20)
    assert upload_all(mine, store)[0].is_drained
    assert owner_of(store).identity == own.identity


@pytest.mark.parametrize("owner", ["sound", "damaged"])
def test_an_older_run_goes_on_from_its_store_alone_with_a_warning(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], owner: str
) -> None:
    make_older(store)
    if owner == "damaged":
        put(store, OWNER, b"{")
    paths = resume(str(store.address), tmp_path / "elsewhere")
    assert known_identity(paths).identity is None
    own = settle(paths)
    assert "from an older version" in " ".join(capsys.readouterr().err.split())
    assert restore(store, paths, say=print) == paths.checkpoint(20)
    assert upload_all(paths, store)[0].is_drained and owner_of(store).identity == own.identity


def test_a_checkpoint_of_another_run_is_not_taken_from_the_store(
    store: ObjectStore, mine: RunPaths, tmp_path: Path
) -> None:
    """Another user with write access adds a newer checkpoint to the store."""
    own = store_at(tmp_path / "own" / "exp1")
    upload_all(mine, own)
    planted = tmp_path / "own" / "exp1" / "checkpoints" / "step_00000020"
    shutil.copytree(tmp_path / "theirs" / "exp1" / "checkpoints" / planted.name, planted)
    said: list[str] = []
    assert restore(own, mine, say=said.append) is None
    words = " ".join(said)
    assert str(MINE.identity) in words and str(THEIRS.identity) in words
    assert content_of(planted) and not mine.checkpoint(20).exists()


def test_a_damaged_record_comes_back_from_a_checkpoint(mine: RunPaths) -> None:
    mine.identity.write_text("{", encoding="utf-8")
    assert settle(mine).identity == MINE.identity
    mine.identity.unlink()
    mine.identity.mkdir()
    assert settle(mine).identity == MINE.identity
    assert mine.identity.is_file()


def test_a_collect_of_a_run_of_this_machine_stays_refused(
    store: ObjectStore, mine: RunPaths
) -> None:
    with pytest.raises(UsageError, match="was started on this machine"):
        collect_from_store(store, mine, say=print)
