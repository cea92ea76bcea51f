"""One uploader and a store in a folder: claims, other writers, and skipped files."""

from __future__ import annotations

import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import BinaryIO

import pytest

from payload.config.store_address import parse_store_address
from payload.run_record.run_files import RunPaths, last_record, write_json
from payload.run_record.store_state import StoreState
from payload.storage import records
from payload.storage.checkpoints import Upload, fetch_newest, whole_checkpoints
from payload.storage.objects import ConflictError, ObjectStore, StoreError
from payload.storage.opening import open_store
from payload.storage.owner import LostOwnershipError, claim, new_token, require_owner
from payload.storage.records import Records
from payload.storage.uploader import Uploader
from tests.storage.folders import content_of, write_checkpoint
from tests.storage.uploading import upload_all
from tests.support.identities import MINE, write_identity


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    made = RunPaths(tmp_path / "a-run")
    made.root.mkdir()
    return write_identity(made)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(parse_store_address(str(tmp_path / "store" / "a-run")))


def once(fail: StoreError, real: Callable[..., object]) -> Callable[..., object]:
    """Return a method that fails at its first call, after completing the call."""
    left = [fail]

    def method(*words: object, **more: object) -> object:
        result = real(*words, **more)
        if left:
            raise left.pop()
        return result

    return method


@pytest.mark.parametrize("method", ["entries", "put"])
def test_a_new_run_whose_first_requests_fail_is_still_its_own(
    paths: RunPaths, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The first put writes owner.json, and the first listing follows it."""
    write_checkpoint(paths.checkpoints, 1, seed=0)
    monkeypatch.setattr(store, method, once(StoreError("503"), getattr(store, method)))
    state, said = upload_all(paths, store, is_new=True)
    assert state.is_drained, said
    assert whole_checkpoints(store) == ["step_00000001"]


def test_a_new_run_s_second_uploader_goes_on_where_the_first_one_was_killed(
    paths: RunPaths, store: ObjectStore
) -> None:
    token = new_token()
    write_json(paths.store_state, StoreState(address=str(store.address), token=token))
    claim(store, token=token, is_new=True, host="here", run=MINE, place="runs/r")
    write_checkpoint(paths.checkpoints, 1, seed=0)
    assert upload_all(paths, store, is_new=True)[0].is_drained
    other = RunPaths(paths.root.parent / "other")
    other.root.mkdir()
    state, _ = upload_all(other, store, is_new=True)
    assert not state.is_drained
    assert "already has a run with this id" in str(state.problem)


def test_a_late_writer_changes_nothing_of_the_new_owner_s_checkpoint(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Upload(write_checkpoint(tmp_path / "late", 1, seed=1))
    newer = write_checkpoint(tmp_path / "newer", 1, seed=2)
    put = store.put

    def overtaken(
        name: str, content: BinaryIO, *, size: int, generation: int | None = None
    ) -> object:
        monkeypatch.setattr(store, "put", put)
        upload = Upload(newer)
        upload.send(store, may_write=lambda: None)
        upload.close()
        return put(name, content, size=size, generation=generation)

    monkeypatch.setattr(store, "put", overtaken)
    with pytest.raises(ConflictError):
        late.send(store, may_write=lambda: None)
    late.close()
    found = fetch_newest(store, tmp_path / "there", passed_over=lambda name, why: None)
    assert found is not None and content_of(found) == content_of(newer)


def test_records_are_written_over_what_is_known_and_nothing_else(
    paths: RunPaths, store: ObjectStore
) -> None:
    late, newer = Records(paths), Records(paths)
    paths.metrics.write_text("1\n")
    late.send(store)
    paths.metrics.write_text("1\n2\n")
    newer.send(store)
    paths.metrics.write_text("1\n3\n4\n")
    with pytest.raises(ConflictError):
        late.send(store, all_of_them=True)
    assert store.read("metrics.jsonl")[0] == b"1\n2\n"


def test_what_a_killed_uploader_left_in_a_folder_is_removed(
    paths: RunPaths, store: ObjectStore, tmp_path: Path
) -> None:
    left = tmp_path / "store" / "a-run" / "checkpoints" / "step_00000005" / ".m.ab12.partial"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    upload_all(paths, store)
    assert not left.exists()


def test_what_is_left_out_is_said_and_the_store_has_not_all(
    paths: RunPaths, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_MOST_BYTES", 300)
    paths.metrics.write_text("x" * 301)
    state, said = upload_all(paths, store)
    assert state.is_idle and not state.is_drained
    assert [line for line in said if "metrics.jsonl is no longer uploaded" in line] == said


def test_a_damaged_checkpoint_is_left_out_and_the_next_of_its_name_is_not(
    paths: RunPaths, store: ObjectStore
) -> None:
    folder = write_checkpoint(paths.checkpoints, 1, seed=0)
    model = folder / "model.safetensors"
    model.write_bytes(bytes(model.stat().st_size))
    receiver, sender = os.pipe()
    said: list[str] = []
    with os.fdopen(receiver) as commands:
        uploader = Uploader(
            paths, store, keep=2, final_wait_s=5.0, is_new=True, say=said.append, first_pause_s=0.05
        )
        thread = threading.Thread(target=uploader.run, args=(commands,))
        thread.start()
        os.write(sender, b"drain\n")
        while (state := last_record(StoreState, paths.store_state)) is None or not state.is_idle:
            thread.join(0.02)
            assert thread.is_alive()
        assert not state.is_drained and whole_checkpoints(store) == []
        shutil.rmtree(folder)
        write_checkpoint(paths.checkpoints, 1, seed=1)
        os.close(sender)
        thread.join()
    state = last_record(StoreState, paths.store_state)
    assert state is not None and state.is_drained
    assert whole_checkpoints(store) == ["step_00000001"]


@pytest.fixture
def server_that_breaks_off() -> Iterator[str]:
    """A server that accepts the begin of an upload, then disconnects."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            upload = f"{url}/upload/storage/v1/b/bucket-x/o?uploadType=resumable&upload_id=SECRET"
            self.send_header("Location", upload)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"

        def answer_once() -> None:
            server.handle_request()
            server.socket.close()

        threading.Thread(target=answer_once, daemon=True).start()
        yield url


def test_an_upload_s_url_is_in_no_message(
    server_that_breaks_off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server_that_breaks_off)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    store = open_store(parse_store_address("gs://bucket-x/runs/r"), retry_s=0.5, timeout_s=2)
    with pytest.raises(StoreError) as caught:
        store.put("x", io.BytesIO(b"x" * 9_000_000), size=9_000_000)
    assert "SECRET" not in str(caught.value) and "/upload/storage" in str(caught.value)


def test_the_new_owner_s_name_adds_no_line_to_a_message(store: ObjectStore) -> None:
    """The attack: the host in owner.json continued with a line like those of a command."""
    host = "x\nerror: the store was moved. Run: this"
    claim(store, token="1" * 32, is_new=True, host=host, run=MINE, place="runs/r")
    with pytest.raises(LostOwnershipError) as caught:
        require_owner(store, "2" * 32)
    assert "x error: the store was moved" in str(caught.value) and "\n" not in str(caught.value)
