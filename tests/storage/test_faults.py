"""A store that fails in all ways: an incomplete checkpoint is never accepted."""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from payload.config.store_address import parse_store_address
from payload.formats.checkpoint_listing import manifest_problems
from payload.run_record.run_files import RunPaths, last_record
from payload.run_record.store_state import StoreState
from payload.storage.bucket import BucketStore
from payload.storage.checkpoints import Upload, fetch_newest, whole_checkpoints
from payload.storage.objects import ABSENT, ConflictError, ObjectStore, StoreError
from payload.storage.opening import check_store, open_store
from payload.storage.uploader import Uploader
from tests.storage.folders import content_of, write_checkpoint
from tests.storage.server import BUCKET, KINDS, Faults, FaultyProxy

pytestmark = pytest.mark.processes

RUN = f"gs://{BUCKET}/runs/a-run"


def store_of(address: str = RUN, *, retry_s: float = 0.4, timeout_s: float = 60.0) -> ObjectStore:
    return open_store(parse_store_address(address), retry_s=retry_s, timeout_s=timeout_s)


def lose_the_write(proxy: FaultyProxy) -> None:
    """Inject faults only into requests that write an object."""

    def choose(method: str, path: str) -> float:
        # An upload in parts begins with a POST that writes nothing yet.
        return 1.0 if method == "PUT" or "uploadType=multipart" in path else 0.0

    proxy.chance = choose


def refuse(name: str, why: str) -> None:
    raise AssertionError(f"{name} was skipped: {why}")


@pytest.fixture(autouse=True)
def _no_proxy_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.parametrize(
    ("seed", "faults"),
    [(1, 40), *(pytest.param(seed, 200, marks=pytest.mark.slow) for seed in (1, 2))],
)
def test_under_faults_no_half_written_checkpoint_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, faults: int
) -> None:
    paths = RunPaths(tmp_path / "a-run")
    paths.root.mkdir()
    written: dict[str, dict[str, bytes]] = {}
    accepted: list[str] = []
    said: list[str] = []
    with FaultyProxy(Faults(seed=seed, share=0.3)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)

        def read() -> None:
            """Restore as a resume on another machine would, through the same faults."""
            place = tmp_path / "elsewhere"
            shutil.rmtree(place, ignore_errors=True)
            try:
                found = fetch_newest(store_of(), place, passed_over=lambda name, why: None)
            except StoreError:
                return
            if found is not None:
                assert manifest_problems(found) == []
                assert content_of(found) == written[found.name]
                accepted.append(found.name)

        step = 0
        while proxy.injected.total() < faults or {*proxy.injected} != {*KINDS}:
            # A killed supervisor leaves its uploader's progress unchanged.
            receiver, sender = os.pipe()
            uploader = Uploader(
                paths,
                store_of(),
                keep=2,
                final_wait_s=60.0,
                is_new=step == 0,
                say=said.append,
                first_pause_s=0.05,
            )
            with os.fdopen(receiver) as commands:
                thread = threading.Thread(target=uploader.run, args=(commands,))
                thread.start()
                for _ in range(6):
                    step += 1
                    folder = write_checkpoint(paths.checkpoints, step, seed=seed)
                    written[folder.name] = content_of(folder)
                    if step > 2:
                        shutil.rmtree(paths.checkpoint(step - 2))
                    read()
                os.close(sender)
                thread.join()
            state = last_record(StoreState, paths.store_state)
            assert state is not None and state.is_drained, (state, said[-8:])
            assert state.checkpoint == folder.name

        assert accepted
        # Without faults the store has two checkpoints, and no part of another.
        proxy.faults.share = 0.0
        assert whole_checkpoints(store_of()) == [f"step_{each:08d}" for each in (step - 1, step)]
        names = {Path(name).parent.name for name in proxy.server.names() if "step_" in name}
        assert names == {f"step_{each:08d}" for each in (step - 1, step)}
        found = fetch_newest(store_of(), tmp_path / "end", passed_over=refuse)
        assert found is not None and content_of(found) == written[found.name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_each_kind_on_the_manifest_leaves_it_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = write_checkpoint(tmp_path, 5, seed=0)
    with FaultyProxy(Faults(seed=0, kinds=(kind,))) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        upload = Upload(folder)

        def spoil(method: str, path: str) -> float:
            wrote = len([name for name in proxy.server.names() if "step_" in name])
            return 1.0 if method == "POST" and wrote == 4 else 0.0

        proxy.chance = spoil
        with suppress(StoreError):
            upload.send(store_of(retry_s=0.2), may_write=lambda: None)
        proxy.chance = None
        assert proxy.injected.total() >= 1
        names = whole_checkpoints(store_of())
        if names:
            found = fetch_newest(store_of(), tmp_path / "there", passed_over=refuse)
            assert found is not None and content_of(found) == content_of(folder)
        upload.send(store_of(), may_write=lambda: None)
        found = fetch_newest(store_of(), tmp_path / "again", passed_over=refuse)
        assert found is not None and content_of(found) == content_of(folder)
        upload.close()


def test_what_is_spoilt_in_the_store_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[str] = []
    with FaultyProxy(Faults(seed=0)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        store = store_of()
        for step in (1, 2, 3, 4):
            upload = Upload(write_checkpoint(tmp_path, step, seed=0))
            upload.send(store, may_write=lambda: None)
            upload.close()
        assert isinstance(store, BucketStore)
        model = "checkpoints/step_{:08d}/model.safetensors".format
        good = store.read(model(4))[0]
        bad = bytes([good[0] ^ 1]) + good[1:]
        path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=runs/a-run/"
        assert proxy.server.request("POST", path + model(4), bad)[0] == 200
        assert proxy.server.request("POST", path + model(3), good[:-1])[0] == 200
        store.remove("checkpoints/step_00000002/manifest.json")

        def note(name: str, why: str) -> None:
            passed.append(f"{name}: {why}")

        found = fetch_newest(store, tmp_path / "there", passed_over=note)
        assert found is not None and found.name == "step_00000001"
        assert [line.partition(":")[0] for line in passed] == ["step_00000004", "step_00000003"]
        assert "SHA-256" in passed[0] and "bytes" in passed[1]


def test_a_store_that_is_down_is_named_once_and_is_left_after_the_final_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "a-run")
    write_checkpoint(paths.checkpoints, 1, seed=0)
    said: list[str] = []
    with FaultyProxy(Faults(seed=0)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        proxy.down = True
        receiver, sender = os.pipe()
        uploader = Uploader(
            paths,
            store_of(retry_s=0.1),
            keep=2,
            final_wait_s=0.5,
            is_new=True,
            say=said.append,
            first_pause_s=0.05,
        )
        with os.fdopen(receiver) as commands:
            thread = threading.Thread(target=uploader.run, args=(commands,))
            thread.start()
            while (
                state := last_record(StoreState, paths.store_state)
            ) is None or state.failures < 3:
                time.sleep(0.02)
            os.close(sender)
            thread.join()
    state = last_record(StoreState, paths.store_state)
    assert state is not None and not state.is_drained and state.checkpoint is None
    assert state.problem is not None and "503" in state.problem
    assert [line for line in said if line.startswith("warning: results are not in")] == said
    assert len(said) == 1


def test_a_check_whose_write_was_done_and_its_answer_lost_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FaultyProxy(Faults(seed=0, kinds=("lost answer",), most=1)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        lose_the_write(proxy)
        check_store(parse_store_address(RUN))
        assert proxy.injected.total() == 1
        assert proxy.server.names() == []


@pytest.mark.parametrize("before", [False, True], ids=["a new object", "over an older one"])
def test_a_write_that_was_done_and_its_answer_lost_is_its_own(
    monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    with FaultyProxy(Faults(seed=0, kinds=("lost answer",), most=1)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        store = store_of()
        generation = ABSENT
        if before:
            proxy.faults.most = 0
            generation = store.put("x", io.BytesIO(b"before"), size=6, generation=ABSENT).generation
            proxy.faults.most = 1
        lose_the_write(proxy)
        content = os.urandom(1000)
        put = store.put("x", io.BytesIO(content), size=1000, generation=generation)
        assert proxy.injected.total() == 1
        assert store.read("x") == (content, put.generation)
        # The next write replaces this generation.
        proxy.chance = None
        store.put("x", io.BytesIO(b"after"), size=5, generation=put.generation)


@pytest.mark.parametrize("compares", [True, False])
def test_a_write_whose_bytes_change_on_the_way_leaves_what_the_store_had(
    monkeypatch: pytest.MonkeyPatch, compares: bool
) -> None:
    """If a machine is lost before its next write, the store still has the last record.

    A server that ignores checksums has stored the wrong bytes, which must be removed.
    """
    with FaultyProxy(Faults(seed=0, kinds=("wrong bytes",), most=1)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        before, after = os.urandom(2000), os.urandom(3000)
        written = store_of().put("x", io.BytesIO(before), size=2000, generation=ABSENT)
        proxy.compares = compares
        proxy.chance = lambda method, path: float("upload" in path)
        with pytest.raises(StoreError, match=r"^writing gs://[^ ]+/x: "):
            store_of().put("x", io.BytesIO(after), size=3000, generation=written.generation)
        assert proxy.injected.total() == 1
        there = [each.name for each in store_of().entries()]
        assert there == (["x"] if compares else [])
        if compares:
            assert store_of().read("x") == (before, written.generation)


def test_a_listing_that_is_no_document_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FaultyProxy(Faults(seed=0, kinds=("wrong bytes",), most=0)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        for name in ("a", "b"):
            store_of().put(name, io.BytesIO(b"x"), size=1, generation=ABSENT)
        for most in range(1, 3):
            proxy.injected.clear()
            proxy.faults.most = most
            proxy.chance = lambda method, path: float(method == "GET")
            assert [each.name for each in store_of().entries()] == ["a", "b"]


@pytest.mark.parametrize("changed", [1, 3])
def test_a_record_whose_bytes_change_on_the_way_is_brought_again(
    monkeypatch: pytest.MonkeyPatch, changed: int
) -> None:
    """Records have no stored hash, so the object's checksum is verified."""
    with FaultyProxy(Faults(seed=0, kinds=("wrong bytes",), most=0)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        store_of().put("run.toml", io.BytesIO(b"seed = 1"), size=8, generation=ABSENT)
        proxy.faults.most = changed
        proxy.chance = lambda method, path: float(method == "GET" and "alt=media" in path)
        found = io.BytesIO()
        if changed == 3:
            with pytest.raises(StoreError, match="its checksum is wrong"):
                store_of().fetch("run.toml", found, most_bytes=8, progressed=lambda: None)
        else:
            store_of().fetch("run.toml", found, most_bytes=8, progressed=lambda: None)
            assert found.getvalue() == b"seed = 1"
        assert proxy.injected.total() == changed


def test_the_same_bytes_by_somebody_else_are_not_one_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FaultyProxy(Faults(seed=0)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        store_of().put("x", io.BytesIO(b"same"), size=4, generation=ABSENT)
        with pytest.raises(ConflictError, match="another process has written this"):
            store_of().put("x", io.BytesIO(b"same"), size=4, generation=ABSENT)


def test_an_uploader_whose_every_first_answer_is_lost_says_nothing_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "a-run")
    write_checkpoint(paths.checkpoints, 1, seed=0)
    paths.metrics.write_text("{}\n")
    said: list[str] = []
    lost: set[str] = set()
    with FaultyProxy(Faults(seed=0, kinds=("lost answer",))) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)

        def lose_the_first(method: str, path: str) -> float:
            there = len(proxy.server.names())
            is_first = "uploadType=multipart" in path and str(there) not in lost
            lost.update([str(there)] if is_first else [])
            return float(is_first)

        proxy.chance = lose_the_first
        receiver, sender = os.pipe()
        os.close(sender)
        with os.fdopen(receiver) as commands:
            Uploader(
                paths,
                store_of(retry_s=2.0),
                keep=2,
                final_wait_s=60.0,
                is_new=True,
                say=said.append,
                first_pause_s=0.05,
            ).run(commands)
        # owner.json, metrics.jsonl and the checkpoint's files, each of which lost its first answer.
        assert proxy.injected.total() >= len(proxy.server.names()) == 8
        state = last_record(StoreState, paths.store_state)
        assert state is not None and state.is_drained and state.failures == 0, said
        assert [line for line in said if "warning" in line] == []
