"""`collect` of a run from its store keeps valid local files."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from payload.config.run_config import load_run_config, parse_run_config
from payload.config.store_address import StoreAddress, parse_store_address
from payload.core.errors import ExitCode, UsageError
from payload.orchestrate.runs.run_index import collect_from_store, resumable_run
from payload.run_record.metrics_log import EvalMetrics, to_json_line
from payload.run_record.run_files import RunPaths
from payload.run_record.run_lock import RunLock
from payload.storage.checkpoints import Upload
from payload.storage.folder import FolderStore
from payload.storage.objects import ObjectStore, StoredObject, StoreReader, TooLargeError
from payload.storage.opening import open_store
from payload.storage.restore import fetch_run, restore
from tests.storage.folders import content_of, write_checkpoint
from tests.support.identities import MINE, write_identity
from tests.support.launching import REPO
from tests.support.waiting import DEADLINE_S


def rows(last: int) -> bytes:
    steps = (EvalMetrics(step=step, val_loss=1.0, val_tokens=8) for step in range(1, last + 1))
    return "".join(to_json_line(replace(row, time_unix=float(row.step))) for row in steps).encode()


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of two steps in a store, and the local folder for `collect`."""

    store: ObjectStore
    paths: RunPaths
    checkpoint: Path

    def put(self, records: Mapping[str, bytes]) -> None:
        for name, content in records.items():
            self.store.put(name, io.BytesIO(content), size=len(content))

    def collect(self) -> Path | None:
        return collect_from_store(self.store, self.paths, say=lambda line: None)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return stored_in(open_store(parse_store_address(str(tmp_path / "store")).under("r")), tmp_path)


def stored_in(store: ObjectStore, folder: Path) -> Stored:
    """Upload a run of two steps to a store."""
    checkpoint = write_checkpoint(folder / "elsewhere", 2, seed=0)
    upload = Upload(checkpoint)
    upload.send(store, may_write=lambda: None)
    upload.close()
    made = Stored(store, RunPaths(folder / "runs" / "r"), checkpoint)
    made.put({"run.toml": b"", "metrics.jsonl": rows(2), "logs/rank_0000.log": b"two\n"})
    made.put({"identity.json": MINE.to_json().encode()})
    return made


def test_a_run_that_is_supervised_here_is_left_alone(stored: Stored) -> None:
    paths = stored.paths
    paths.root.mkdir(parents=True)
    paths.metrics.write_bytes(rows(3))
    partial = paths.checkpoints / "step_00000002.partial"
    partial.mkdir(parents=True)
    with RunLock(paths), pytest.raises(UsageError, match="--runs-dir"):
        stored.collect()
    # The same after the run has ended.
    with pytest.raises(UsageError, match="was started on this machine"):
        stored.collect()
    assert paths.metrics.read_bytes() == rows(3) and partial.is_dir()
    assert not paths.logs.exists()


def test_a_copy_that_is_further_keeps_its_records_and_gets_what_it_lacks(stored: Stored) -> None:
    paths = write_identity(stored.paths)
    partial = paths.checkpoints / "step_00000002.partial"
    partial.mkdir(parents=True)
    paths.metrics.write_bytes(rows(3))
    newer = write_checkpoint(paths.checkpoints, 3, seed=9)
    before = content_of(newer)
    assert stored.collect() == newer
    assert paths.metrics.read_bytes() == rows(3)
    assert content_of(newer) == before and partial.is_dir()
    assert paths.rank_log(0).read_text() == "two\n"
    assert sorted(path.name for path in paths.root.iterdir() if path.is_dir()) == [
        "checkpoints",
        "logs",
    ]


def test_a_checkpoint_of_the_same_name_stays_where_it_is_sound(stored: Stored) -> None:
    write_identity(stored.paths)
    own = write_checkpoint(stored.paths.checkpoints, 2, seed=9)
    before = content_of(own)
    assert stored.collect() == own
    assert content_of(own) == before
    (own / "model.safetensors").write_bytes(b"damaged")
    assert stored.collect() == own
    assert content_of(own) == content_of(stored.checkpoint)


def test_a_second_collect_brings_what_the_run_has_told_since(stored: Stored) -> None:
    first = stored.collect()
    assert first is not None and content_of(first) == content_of(stored.checkpoint)
    stored.put({"metrics.jsonl": rows(5), "logs/rank_0000.log": b"two\nfive\n"})
    assert stored.collect() == first
    assert stored.paths.metrics.read_bytes() == rows(5)
    assert stored.paths.rank_log(0).read_text() == "two\nfive\n"


def test_a_run_that_has_ended_in_the_store_takes_the_place_of_one_that_goes_on(
    stored: Stored,
) -> None:
    state = {"schema_version": 1, "run_id": "r", "status": "running", "started_unix": 1.0}
    stored.put({"state.json": json.dumps(state | {"updated_unix": 2.0}).encode()})
    stored.collect()
    ended = state | {"status": "failed", "exit_class": "crash", "updated_unix": 3.0}
    stored.put({"state.json": json.dumps(ended).encode()})
    stored.collect()
    assert json.loads(stored.paths.state.read_text()) == ended


PLANTED = {
    "job.json": b'{"schema_version": 1, "scheduler": "slurm", "job_id": "7"}',
    "mirror.json": b"{}",
    "report.html": b"<script>alert(1)</script>",
    "supervisor.lock": b"",
    "stop.json": b"{}",
    "manifest_hashes.json": b'{"schema_version": 1, "hashes": []}',
    "checkpoints": b"no folder",
    "logs/evil.sh": b"",
    "logs/.hidden.log": b"",
    f"logs/{'a' * 300}.log": b"",
    "profile/a\nb": b"",
    "track/wandb/x": b"",
}


def test_only_records_are_taken_and_nothing_else_blocks_them(tmp_path: Path) -> None:
    """Names that a bucket accepts, including names over 255 bytes and with NUL."""
    store = Planted(tmp_path / "store")
    made = stored_in(store, tmp_path)
    said: list[str] = []
    found = collect_from_store(store, made.paths, say=said.append)
    assert found is not None and content_of(found) == content_of(made.checkpoint)
    there = {str(path.relative_to(made.paths.root)) for path in made.paths.root.rglob("*")}
    assert {name.partition("/")[0] for name in there if not name.endswith(".lock")} == {
        *("run.toml", "identity.json", "named.json", "metrics.jsonl", "logs", "checkpoints")
    }
    assert {name for name in there if name.startswith("logs/")} == {"logs/rank_0000.log"}
    restored = RunPaths(tmp_path / "resumed" / "r")
    fetch_run(store, restored)
    again = restore(store, restored, say=said.append)
    assert again is not None and content_of(again) == content_of(made.checkpoint)
    assert "warning: logs/rank_0001.log is not downloaded: the file is over 1 GiB" in said


class Planted(FolderStore):
    """A store with additional objects of another user."""

    def __init__(self, folder: Path) -> None:
        super().__init__(StoreAddress(None, str(folder)).under("r"))

    def entries(self, prefix: str = "") -> list[StoredObject]:
        """Also list names that a folder cannot have, and a log of 40 GiB."""
        names = {**dict.fromkeys(PLANTED, 9), "logs/a\0b.log": 9, "logs/rank_0001.log": 40 * 2**30}
        planted = [
            StoredObject(name=name, bytes=size, generation=1) for name, size in names.items()
        ]
        return [*super().entries(prefix), *(e for e in planted if e.name.startswith(prefix))]

    def fetch(
        self, name: str, into: BinaryIO, *, most_bytes: int, progressed: Callable[[], None]
    ) -> None:
        """Return the content of an additional object."""
        if name in PLANTED:
            into.write(PLANTED[name])
        else:
            super().fetch(name, into, most_bytes=most_bytes, progressed=progressed)


def test_what_has_grown_since_the_listing_is_left_at_the_limit(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.put({"logs/rank_0000.log": b"two\n"})
    monkeypatch.setattr("payload.storage.records._MOST_BYTES", 50_000)
    written: list[int] = []
    read = FolderStore.fetch

    def fetch(self: FolderStore, name: str, into: BinaryIO, **limits: Any) -> None:
        if name.endswith((".log", ".safetensors")):
            with Path(self.address.path, name).open("ab") as file:
                file.write(bytes(100_000))
        try:
            read(self, name, into, **limits)
        finally:
            written.append(into.tell())

    monkeypatch.setattr(FolderStore, "fetch", fetch)
    said: list[str] = []
    found = collect_from_store(stored.store, stored.paths, say=said.append)
    assert found is None and not stored.paths.logs.exists()
    assert any("logs/rank_0000.log is not downloaded: the file is larger" in line for line in said)
    assert any("step_00000002 in the store is skipped" in line for line in said)
    assert max(written) < 50_000


def test_a_small_object_that_grows_while_it_is_read_is_refused(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(descriptor: int) -> os.stat_result:
        now = os.stat(descriptor)
        return os.stat_result((*now[:6], 0, *now[7:10]))

    monkeypatch.setattr("payload.storage.folder.os.fstat", before)
    monkeypatch.setattr("payload.storage.folder.SMALL_BYTES", 10)
    with pytest.raises(TooLargeError):
        stored.store.read("metrics.jsonl")


def test_logs_and_profiles_together_have_a_limit_and_leave_half_of_the_disk(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = {f"logs/{name}.log": bytes(size) for name, size in (("a", 300), ("b", 300), ("c", 99))}
    stored.put({**logs, "logs/rank_0000.log": b"", "profile/operators.json": bytes(300)})
    monkeypatch.setattr("payload.storage.records.free_bytes", lambda folder: 800)
    said: list[str] = []
    assert collect_from_store(stored.store, stored.paths, say=said.append) is not None
    brought = sorted(path.name for path in stored.paths.logs.iterdir())
    assert brought == ["a.log", "c.log", "rank_0000.log"] and not stored.paths.profile.exists()
    (warning,) = [line for line in said if "not downloaded" in line]
    assert "2 log(s) or profile(s) are not downloaded (first: logs/b.log" in warning
    assert stored.paths.metrics.read_bytes() == rows(2)

    monkeypatch.undo()
    monkeypatch.setattr("payload.storage.records._MOST_LOG_BYTES", 300)
    said.clear()
    collect_from_store(
        stored.store, RunPaths(stored.paths.root.parent.parent / "r"), say=said.append
    )
    (warning,) = [line for line in said if "not downloaded" in line]
    assert "(first: logs/b.log" in warning


@pytest.mark.processes
@pytest.mark.parametrize("by", ["id", "address"])
def test_a_resume_stays_in_the_store_that_the_run_was_found_in(stored: Stored, by: str) -> None:
    stored.put({"run.toml": b'[storage]\nresults = "/srv/of-somebody-else"\n'})
    results = stored.store.address.parent()
    settings = parse_run_config("", overrides=[f"storage.results={results}"], where="test")
    paths, overrides = resumable_run(
        "r" if by == "id" else str(stored.store.address),
        runs_dir=stored.paths.root.parent,
        overrides=[],
        settings=lambda: settings,
        has_config=False,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        say=lambda _: None,
    )
    found = load_run_config(paths.config, overrides=overrides)
    assert found.storage.address() == results


@pytest.mark.processes
def test_two_first_collects_at_once_bring_one_whole_run(stored: Stored) -> None:
    stored.put({f"logs/rank_{rank:04d}.log": rows(200) for rank in range(60)})
    runs = stored.paths.root.parent
    words = ["collect", str(stored.store.address), "--runs-dir", str(runs)]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "payload.orchestrate", *words],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == ExitCode.OK, said
    assert content_of(stored.paths.checkpoints / "step_00000002") == content_of(stored.checkpoint)
    assert stored.paths.metrics.read_bytes() == rows(2)
    assert len(list(stored.paths.logs.glob("rank_*.log"))) == 60
    assert [path.name for path in runs.iterdir() if path.name not in ("r", "latest")] == []


def test_a_run_that_another_collect_has_made_meanwhile_is_taken(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(store: StoreReader, paths: RunPaths) -> None:
        fetch_run(store, paths)
        monkeypatch.undo()
        assert (
            stored.collect() is not None
        )  # the other process finishes while this one still downloads

    monkeypatch.setattr("payload.storage.store_access.fetch_run", late)
    found = stored.collect()
    assert found is not None and content_of(found) == content_of(stored.checkpoint)
    assert [path.name for path in stored.paths.root.parent.iterdir()] == ["r"]
