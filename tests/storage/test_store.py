"""A bucket and a mounted folder behave the same; an unusable store raises a one-line error."""

from __future__ import annotations

import functools
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.config.run_config import parse_run_config
from payload.config.store_address import parse_store_address, resolve_results_address
from payload.core.errors import ConfigError, DataError, ExitCode
from payload.orchestrate.__main__ import main as orchestrate
from payload.storage.bucket import BucketStore, _libraries
from payload.storage.checkpoints import Upload, fetch_newest, remove_checkpoints, whole_checkpoints
from payload.storage.isolated_reader import watched_store
from payload.storage.objects import (
    ABSENT,
    ConflictError,
    MissingObjectError,
    ObjectStore,
    StoreError,
    StoreRefusedError,
    TooLargeError,
)
from payload.storage.opening import check_store, open_store
from payload.storage.owner import LostOwnershipError, claim, new_token, require_owner
from payload.storage.store_access import fetch_data_to_cache
from tests.storage.folders import content_of, write_checkpoint
from tests.storage.server import BUCKET, Faults, FaultyProxy
from tests.support.data_folders import make_data_folder
from tests.support.identities import MINE
from tests.support.launching import REPO

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    with FaultyProxy(Faults(seed=0)) as made:
        yield made


@pytest.fixture(params=["bucket", "folder"])
def store(
    request: pytest.FixtureRequest,
    proxy: FaultyProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> ObjectStore:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    place = f"gs://{BUCKET}/{tmp_path.name}" if request.param == "bucket" else str(tmp_path / "s")
    return open_store(parse_store_address(place))


def put(store: ObjectStore, name: str, content: bytes, generation: int | None = None) -> int:
    stored = store.put(name, io.BytesIO(content), size=len(content), generation=generation)
    return stored.generation


def test_a_write_and_a_removal_keep_to_their_generation(store: ObjectStore) -> None:
    first = put(store, "a/b", b"one", ABSENT)
    with pytest.raises(ConflictError):
        put(store, "a/b", b"two", ABSENT)
    second = put(store, "a/b", b"two", first)
    assert second != first
    assert store.read("a/b") == (b"two", second)
    with pytest.raises(ConflictError):
        put(store, "a/b", b"three", first)
    with pytest.raises(ConflictError):
        store.remove("a/b", generation=first)
    store.remove("a/b", generation=second)
    store.remove("a/b")
    with pytest.raises(MissingObjectError):
        store.read("a/b")
    assert store.entries() == []


def test_names_are_listed_by_their_beginning_and_their_first_part(store: ObjectStore) -> None:
    for name in ("one/x", "one/y/z", "two/x", "three"):
        put(store, name, name.encode())
    assert [entry.name for entry in store.entries("one/")] == ["one/x", "one/y/z"]
    assert [entry.bytes for entry in store.entries("t")] == [5, 5]
    assert store.groups() == ["one", "two"]


def test_a_large_object_comes_back_part_by_part(store: ObjectStore) -> None:
    content, into = os.urandom(9_000_000), io.BytesIO()
    put(store, "large", content)
    store.fetch("large", into, most_bytes=len(content), progressed=lambda: None)
    assert into.getvalue() == content
    less = len(content) - 1
    with pytest.raises(TooLargeError, match=r"more than 8,999,999 bytes"):
        store.fetch("large", io.BytesIO(), most_bytes=less, progressed=lambda: None)
    with (
        watched_store(store.address, env=os.environ, say=print) as watched,
        pytest.raises(TooLargeError, match=r"more than 8,999,999 bytes"),
    ):
        watched.fetch("large", io.BytesIO(), most_bytes=less, progressed=lambda: None)


def test_a_checkpoint_goes_there_and_back_and_its_manifest_goes_first(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [write_checkpoint(tmp_path / "here", step, seed=1) for step in (1, 2)]
    for folder in folders:
        upload = Upload(folder)
        upload.send(store, may_write=lambda: None)
        upload.close()
    found = fetch_newest(store, tmp_path / "there", passed_over=lambda name, why: None)
    assert found is not None and content_of(found) == content_of(folders[1])
    removed: list[str] = []
    remove = store.remove

    def note(name: str, *, generation: int | None = None) -> None:
        removed.append(name)
        remove(name, generation=generation)

    monkeypatch.setattr(store, "remove", note)
    remove_checkpoints(store, keep={folders[1].name}, may_write=lambda: None)
    assert removed[0] == f"checkpoints/{folders[0].name}/manifest.json"
    assert len(removed) == 5
    assert whole_checkpoints(store) == [folders[1].name]


def test_who_resumed_a_run_last_owns_it_and_a_new_run_takes_no_id_that_is_there(
    store: ObjectStore,
) -> None:
    token, other = new_token(), new_token()
    claim(store, token=token, is_new=True, host="one", run=MINE, place="runs/r")
    claim(store, token=token, is_new=True, host="one", run=MINE, place="runs/r")
    require_owner(store, token)
    with pytest.raises(ConfigError, match="--resume"):
        claim(store, token=other, is_new=True, host="two", run=MINE, place="runs/r")
    claim(store, token=other, is_new=False, host="two", run=MINE, place="runs/r")
    require_owner(store, other)
    with pytest.raises(LostOwnershipError, match="two has resumed"):
        require_owner(store, token)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3://bucket/x", "only gs:// is supported"),
        ("results", "absolute path"),
        ("gs://", "not a bucket name"),
        ("gs://UPPER/x", "not a bucket name"),
        ("gs://b-1/a//b", "not valid in a prefix"),
        ("gs://b-1/../x", "not valid in a prefix"),
        ("gs://b-1/a b", "not valid in a prefix"),
        ("gs://b-1/" + "/".join(["x" * 100] * 8), "too long"),
    ],
)
def test_a_wrong_address_is_refused_with_the_setting_s_name(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"storage\.results") as caught:
        parse_run_config("", overrides=[f"storage.results={text}"], where="test")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_auto_is_the_cluster_s_bucket_where_it_has_one() -> None:
    assert resolve_results_address("auto", bucket="b-1") == "gs://b-1/runs"
    assert resolve_results_address("auto", bucket=None) == "none"
    assert resolve_results_address("none", bucket="b-1") == "none"


def test_a_bucket_that_is_missing_or_refuses_is_named_with_what_to_do(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    with pytest.raises(StoreRefusedError, match="bucket 'no-such-bucket' does not exist"):
        check_store(parse_store_address("gs://no-such-bucket/x"))
    proxy.refuse = True
    try:
        with pytest.raises(StoreRefusedError, match=r"roles/storage\.objectUser"):
            check_store(parse_store_address(f"gs://{BUCKET}/x"))
    finally:
        proxy.refuse = False


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreRefusedError, match=r"storage\.results"):
        check_store(parse_store_address(str(tmp_path / "file" / "below")))


def test_without_the_client_a_bucket_is_refused_and_a_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "google").mkdir()
    (tmp_path / "google" / "__init__.py").write_text("raise ImportError('blocked')\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}

    def check(address: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "payload.storage", "check", address]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    refused = check("gs://b-1/x")
    assert refused.returncode == ExitCode.CONFIG
    assert "pip install google-cloud-storage" in refused.stderr and refused.stderr.count("\n") == 1
    assert check(str(tmp_path / "there")).returncode == ExitCode.OK


def test_data_in_a_bucket_is_brought_once_and_verified(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data = make_data_folder(
        tmp_path / "data", num_train_tokens=4000, num_val_tokens=200, vocab_size=512
    )
    place = f"gs://{BUCKET}/{tmp_path.name}/data"
    store = open_store(parse_store_address(place))
    config = parse_run_config("", overrides=[f"data.dir={place}"], where="test")
    said: list[str] = []
    with pytest.raises(DataError, match=r"meta\.json is missing"):
        fetch_data_to_cache(config, env=os.environ, say=said.append)
    for path in data.iterdir():
        put(store, path.name, path.read_bytes())
    fetch_data_to_cache(config, env=os.environ, say=said.append)
    fetch_data_to_cache(config, env=os.environ, say=said.append)
    assert len([line for line in said if line.startswith("downloading data: ")]) == 1
    here = config.data.folder()
    assert here.is_relative_to(tmp_path / "home")
    assert content_of(here) == content_of(data)
    assert here.stat().st_mode == data.stat().st_mode, "the umask decides who can read it"

    train = (data / "train.bin").read_bytes()
    put(store, "train.bin", bytes([train[0] ^ 1]) + train[1:])
    shutil.rmtree(here)
    with pytest.raises(DataError, match=r"SHA-256 of train\.bin"):
        fetch_data_to_cache(config, env=os.environ, say=said.append)
    assert not here.exists()
    put(store, "meta.json", (data / "meta.json").read_bytes().replace(b'"train.bin"', b'"../x"'))
    with pytest.raises(DataError, match="not a file of a data folder"):
        fetch_data_to_cache(config, env=os.environ, say=said.append)


def test_data_of_one_address_never_takes_that_of_another_or_what_is_in_use(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    make = functools.partial(
        make_data_folder, num_train_tokens=4000, num_val_tokens=200, vocab_size=512
    )

    def bring(name: str, seed: int) -> Path:
        data = make(tmp_path / f"data{seed}", seed=seed)
        place = f"gs://{BUCKET}/{tmp_path.name}/{name}"
        for path in data.iterdir():
            put(open_store(parse_store_address(place)), path.name, path.read_bytes())
        config = parse_run_config("", overrides=[f"data.dir={place}"], where="test")
        fetch_data_to_cache(config, env=os.environ, say=lambda _: None)
        assert content_of(config.data.folder()) == content_of(data)
        return config.data.folder()

    inner = bring("data/v2", 1)
    with (inner / "train.bin").open("rb") as used:
        before = content_of(inner)
        outer = bring("data", 2)
        assert content_of(inner) == before
        assert bring("data/v2", 3) == inner
        (kept,) = inner.parent.glob("*.replaced-*")
        assert content_of(kept) == before and used.read(1)
    bring("data/v2", 1)
    assert sorted(inner.parent.iterdir()) == sorted([inner, outer])


@pytest.mark.parametrize(
    ("results", "code", "words"),
    [
        (f"gs://{BUCKET}/x", ExitCode.OK, "fit"),
        ("gs://no-such-bucket/x", ExitCode.CONFIG, "no-such"),
    ],
)
def test_preflight_tries_the_store_last(
    proxy: FaultyProxy,
    results: str,
    code: ExitCode,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    setting = f"storage.results={results}"
    command = ["preflight", "--inventory", "local", "--set", setting, "--quick", "--json"]
    status = orchestrate(command, os.environ)
    said = capsys.readouterr()
    assert status == code, said.out + said.err
    assert words in said.out + said.err


def test_credentials_that_have_expired_are_no_missing_role() -> None:
    store = open_store(parse_store_address("gs://b-1/x"))
    assert isinstance(store, BucketStore)
    libraries = _libraries()
    expired = libraries.auth_errors.RefreshError(
        "invalid_grant: Token has been expired or revoked."
    )
    for error in (libraries.errors.Unauthorized("Invalid Credentials"), expired):
        with pytest.raises(StoreRefusedError) as caught, store._plainly("listing runs"):
            raise error
        assert "Google rejected the credentials" in str(caught.value)
        assert "gcloud auth application-default login" in str(caught.value)
        assert "roles/" not in str(caught.value)
    # As on a node whose metadata server is temporarily unavailable.
    with pytest.raises(StoreError) as passing, store._plainly("listing runs"):
        raise libraries.auth_errors.RefreshError("Failed to retrieve http://metadata")
    assert not isinstance(passing.value, StoreRefusedError)
