"""Hashes of files: an unchanged file is read once, and a changed file is detected."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import pytest

from payload.config.store_address import parse_store_address
from payload.core import file_hash
from payload.core.file_hash import sha256_of
from payload.formats.checkpoint_listing import manifest_problems, newest_valid
from payload.orchestrate.commands.config_choice import load_config
from payload.orchestrate.commands.run_commands_options import ConfigOptions
from payload.run_record.run_files import RunPaths
from payload.storage.checkpoints import Upload, fetch_newest
from payload.storage.opening import open_store
from tests.storage.folders import write_checkpoint
from tests.test_checkpoint_listing import make_checkpoint


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Return how often each file was read for its hash, by its inode."""
    found: Counter[int] = Counter()
    digest = hashlib.file_digest

    def counted(file: BinaryIO, name: str) -> object:
        found[os.fstat(file.fileno()).st_ino] += 1
        return digest(file, name)  # type: ignore[arg-type]  # any binary file

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return found


@pytest.fixture
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat files that were just written as old: no program can set a file's ctime."""
    monkeypatch.setattr(file_hash, "_SETTLED_S", -1.0)


def test_a_file_that_was_just_written_is_read_each_time(
    tmp_path: Path, reads: Counter[int]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    assert sha256_of(path) == sha256_of(path) == hashlib.sha256(b"one").hexdigest()
    assert list(reads.values()) == [2]


@pytest.mark.usefixtures("old_files")
def test_an_unchanged_file_is_read_once_under_all_its_names(
    tmp_path: Path, reads: Counter[int]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    (tmp_path / "link").symlink_to(path)
    assert sha256_of(path) == sha256_of(tmp_path / "link") == hashlib.sha256(b"one").hexdigest()
    assert list(reads.values()) == [1]


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("way", ["written", "replaced", "copied over"])
def test_a_file_that_was_changed_in_any_way_has_its_new_hash(tmp_path: Path, way: str) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"one")
    before = path.stat()
    sha256_of(path)
    other.write_bytes(b"two")
    sleep_for_a_tick(path)
    if way == "written":
        path.write_bytes(b"two")
    elif way == "replaced":
        other.replace(path)
    else:
        shutil.copyfile(other, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sha256_of(path) == hashlib.sha256(b"two").hexdigest()


def sleep_for_a_tick(path: Path) -> None:
    """Wait until the clock of a file's file system has advanced."""
    beside = path.with_name("tick")
    while True:
        beside.write_bytes(b"")
        if beside.stat().st_ctime_ns > path.stat().st_ctime_ns:
            return


@pytest.mark.usefixtures("old_files")
def test_a_command_reads_a_checkpoint_once_and_still_refuses_it_after_a_change(
    tmp_path: Path, reads: Counter[int]
) -> None:
    folder = make_checkpoint(tmp_path / "step_00000010")
    reads.clear()
    assert newest_valid(tmp_path) == newest_valid(tmp_path) == folder
    assert not manifest_problems(folder)
    assert set(reads.values()) <= {1}
    weights = folder / "model.safetensors"
    before = weights.stat()
    sleep_for_a_tick(weights)
    weights.write_bytes(b"weightz")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert newest_valid(tmp_path) is None
    problem = "model.safetensors: its SHA-256 differs from the one in the manifest."
    assert manifest_problems(folder) == [problem]


@pytest.mark.usefixtures("old_files")
def test_a_resume_that_takes_its_settings_from_a_checkpoint_reads_that_once(
    tmp_path: Path, reads: Counter[int]
) -> None:
    paths = RunPaths(tmp_path / "demo")
    folder = make_checkpoint(paths.checkpoint(10), config="[train]\nsteps = 77\n")
    paths.config.write_text("damaged")
    file_hash._known.clear()
    reads.clear()
    options = ConfigOptions(inventory=None, config=None, overrides=())
    assert load_config(options, resumed=paths).train.steps == 77
    assert newest_valid(paths.checkpoints) == folder
    assert set(reads.values()) == {1} and len(reads) == 4


def test_a_checkpoint_from_a_store_is_read_once_on_its_way(
    tmp_path: Path, reads: Counter[int]
) -> None:
    store = open_store(parse_store_address(str(tmp_path / "store")).under("r"))
    with closing(Upload(write_checkpoint(tmp_path / "elsewhere", 2, seed=0))) as upload:
        upload.send(store, may_write=lambda: None)
    reads.clear()
    found = fetch_newest(store, tmp_path / "here", passed_over=lambda *why: pytest.fail(str(why)))
    assert found is not None
    assert set(reads.values()) == {1} and len(reads) == 4
