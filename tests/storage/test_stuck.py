"""A hanging store, such as a mount of a lost file server, does not hang any command."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.config.run_config import parse_run_config
from payload.config.store_address import StoreAddress, parse_store_address
from payload.core.errors import ExitCode, PreflightError
from payload.orchestrate.runs.run_index import collect_from_store
from payload.run_record.run_files import RunPaths
from payload.storage import folder
from payload.storage.checkpoints import Upload
from payload.storage.isolated_reader import watched_store
from payload.storage.objects import ObjectStore, StoreError
from payload.storage.opening import open_store
from payload.storage.restore import restore
from payload.storage.store_access import check_store_access, fetch_data_to_cache
from tests.storage.folders import content_of, write_checkpoint
from tests.storage.server import BUCKET, GcsServer
from tests.support.launching import REPO
from tests.support.sshfs_mount import sshfs_mount, stopped

pytestmark = pytest.mark.processes


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[StoreAddress]:
    """A store whose lock another process holds."""
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield parse_store_address(str(tmp_path))


@pytest.mark.slow
def test_an_attempt_that_gets_no_answer_ends(stuck: StoreAddress) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    with pytest.raises(PreflightError, match=r"did not answer within 3 s.*storage\.results"):
        check_store_access(stuck, env=env, timeout_s=3.0)


def test_a_store_s_lock_is_not_waited_for_without_end(
    stuck: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_LOCK_S", 0.1)
    with pytest.raises(StoreError, match="holds its lock"):
        open_store(stuck).put("a", io.BytesIO(b"x"), size=1)


def fill(store: ObjectStore, folder: Path) -> Path:
    """Upload a run with one checkpoint; return the checkpoint."""
    checkpoint = write_checkpoint(folder, 2, seed=0)
    upload = Upload(checkpoint)
    upload.send(store, may_write=lambda: None)
    upload.close()
    store.put("run.toml", io.BytesIO(b""), size=0)
    return checkpoint


@pytest.mark.slow
def test_a_bucket_s_server_that_falls_silent_ends_a_collect_and_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GcsServer() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        address = parse_store_address(f"gs://{BUCKET}/runs/r")
        checkpoint = fill(open_store(address), tmp_path / "elsewhere")
        assert_silence_ends_it(address, server.pid, tmp_path, checkpoint)


@pytest.mark.slow
def test_data_whose_server_falls_silent_is_given_up_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("payload.storage.isolated_reader._BUCKET_S", 3.0)
    monkeypatch.setattr("payload.storage.isolated_reader._NOTE_S", 0.5)
    with GcsServer() as server, stopped(server.pid):
        env = {**os.environ, "STORAGE_EMULATOR_HOST": server.url}
        config = parse_run_config("", overrides=[f"data.dir=gs://{BUCKET}/d"], where="test")
        with pytest.raises(StoreError, match=r"did not answer within 3 s"):
            fetch_data_to_cache(config, env=env, say=lambda line: None)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder mounted by sshfs from a separate file server, and that server's process."""
    with sshfs_mount(tmp_path) as found:
        yield found


@pytest.mark.slow
def test_a_mount_whose_server_falls_silent_ends_a_collect_and_a_resume(
    tmp_path: Path, mounted: tuple[Path, int]
) -> None:
    folder, server_pid = mounted
    address = parse_store_address(str(folder / "runs/r"))
    checkpoint = fill(open_store(address), tmp_path / "elsewhere")
    assert_silence_ends_it(address, server_pid, tmp_path, checkpoint)


def assert_silence_ends_it(
    address: StoreAddress, server_pid: int, tmp_path: Path, checkpoint: Path
) -> None:
    said: list[str] = []
    paths = RunPaths(tmp_path / "runs" / "r")
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    with watched_store(address, env=env, say=said.append, most_s=4.0, note_s=2.0) as store:
        with stopped(server_pid), pytest.raises(StoreError, match="did not answer within 4 s") as e:
            collect_from_store(store, paths, say=said.append)
        assert e.value.exit_code == ExitCode.PREFLIGHT and "\n" not in str(e.value)
    assert [line for line in said if "no answer for 2 s" in line] == said and len(said) == 1
    assert not paths.root.exists()
    paths.root.mkdir(parents=True)
    with (
        watched_store(address, env=env, say=said.append, most_s=4.0, note_s=2.0) as store,
        stopped(server_pid),
        pytest.raises(StoreError, match="did not answer"),
    ):
        restore(store, paths, say=said.append)
    # Once the server answers again, the next attempt succeeds.
    paths.root.rmdir()
    with watched_store(address, env=env, say=said.append) as store:
        found = collect_from_store(store, paths, say=said.append)
    assert found is not None and content_of(found) == content_of(checkpoint)
