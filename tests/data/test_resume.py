"""Killed runs, full disks, and folders that already hold files."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import IO

import psutil
import pytest

from payload.core.errors import DataError
from payload.data.__main__ import main
from payload.data.writing.meta import verify_files
from payload.data.writing.resumable_token_files import JOURNAL_NAME, locked
from payload.formats.data_folder import load_meta
from tests.data.running import (
    REPOSITORY,
    contents,
    data_command,
    environment,
    run_here,
    stdlib_texts,
    write_jsonl,
)
from tests.support.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 4 MB: several shards of 1 MiB."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    return write_jsonl(path, stdlib_texts(min_bytes=1)[::2])


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for a kill before the end, even on a busy machine."""
    lines = write_jsonl(
        tmp_path_factory.mktemp("big") / "part.jsonl", stdlib_texts(min_bytes=7_500_000)
    )
    path = lines.with_name("big.jsonl")
    path.write_bytes(lines.read_bytes() * 6)
    return path


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_run_resumes_and_ends_with_the_same_bytes(big: Path, tmp_path: Path) -> None:
    args = ["--source", "jsonl", "--input", big, "--shard-mib", "1"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_here("prepare", *args, "--out", whole).returncode == 0

    shards: list[int] = []
    for _ in range(2):
        # Several shards: the kill can come later than at the second one.
        wanted = max(shards, default=0) + 2
        killed = subprocess.Popen(
            data_command("prepare", *args, "--out", broken),
            cwd=REPOSITORY,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        journal = broken / JOURNAL_NAME
        while not journal.exists() or journal.read_bytes().count(b"\n") < wanted:
            assert killed.poll() is None, "it was to be killed before its end"
            time.sleep(0.005)
        killed.kill()
        killed.wait()
        shards.append(journal.read_bytes().count(b"\n"))
        assert not (broken / "meta.json").exists()
        assert not (broken / "train.bin").exists()
    assert shards[1] > shards[0]

    last = run_here("prepare", *args, "--out", broken)
    assert last.returncode == 0, last.stderr
    assert "resuming after" in last.stderr
    assert contents(broken) == contents(whole)


def test_a_run_killed_between_the_renames_and_meta_is_finished_by_the_next(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["prepare", "--source", "jsonl", f"--input={corpus}", f"--out={tmp_path / 'out'}"]

    def killed(*_: object) -> None:
        raise SystemExit(137)

    with monkeypatch.context() as patch:
        patch.setattr("payload.data.writing.prepare_text.write_meta", killed)
        with pytest.raises(SystemExit):
            main(args)
    with pytest.raises(DataError, match="it is incomplete"):
        load_meta(tmp_path / "out")
    assert main(args) == 0
    verify_files(tmp_path / "out", load_meta(tmp_path / "out"))


def test_a_ready_folder_is_left_alone_and_another_source_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    args = ["prepare", "--source", "jsonl", f"--input={corpus}", f"--out={out}"]
    assert main(args) == 0
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    first = capsys.readouterr().out

    assert main(args) == 0
    again = capsys.readouterr()
    assert again.out == first
    assert "nothing to do" in again.err
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before

    assert main([*args, "--seed", "1"]) == 10
    assert "other settings. Made from jsonl: " in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before

    assert main([*args, "--seed", "1", "--force"]) == 0
    assert load_meta(out).split.seed == 1


def test_ctrl_c_shows_how_to_resume_and_force_starts_from_scratch(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["prepare", "--source", "jsonl", f"--input={corpus}", f"--out={tmp_path / 'out'}"]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for again, resumes in (([], True), (["--force"], False)):
        with monkeypatch.context() as patch:
            patch.setattr("payload.data.writing.prepare_text._Run._check_result", interrupted)
            assert main([*args, "--force", "--shard-mib", "1"]) == 130
        assert "without --force, to resume from the last shard" in capsys.readouterr().err
        assert main([*args, *again]) == 0
        assert ("resuming after" in capsys.readouterr().err) is resumes


def test_an_unfinished_run_of_another_source_is_not_overwritten(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    shard = {"cursor": {}, "totals": {}, "files": {}, "is_complete": False}
    (out / JOURNAL_NAME).write_text(f'{{"fingerprint": "another"}}\n{json.dumps(shard)}\n')
    args = ["prepare", "--source", "jsonl", f"--input={corpus}", f"--out={out}", "--quiet"]
    assert main(args) == 10
    assert "unfinished run with another source" in capsys.readouterr().err
    assert main([*args, "--force"]) == 0


@pytest.mark.processes
def test_a_lost_partial_file_is_named(
    big: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["prepare", "--source", "jsonl", f"--input={big}", f"--out={tmp_path / 'out'}"]
    killed = subprocess.Popen(
        data_command(*args, "--shard-mib", "1"),
        cwd=REPOSITORY,
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    journal = tmp_path / "out" / JOURNAL_NAME
    while not journal.exists() or journal.read_bytes().count(b"\n") < 2:
        assert killed.poll() is None, "it was to be killed before its end"
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    (tmp_path / "out" / "train.bin.partial").unlink()
    assert main([*args, "--quiet"]) == 10
    assert "train.bin.partial: missing, but .prepare.jsonl lists it" in capsys.readouterr().err
    assert main([*args, "--quiet", "--force", "--max-documents", "50"]) == 0


def test_a_folder_that_cannot_be_written_is_named(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["prepare", "--source", "jsonl", f"--input={corpus}", "--out=/proc", "--quiet"]
    assert main(args) == 10
    assert capsys.readouterr().err.startswith("error: /proc/.prepare.lock: ")


def test_a_train_bin_that_someone_else_made_is_not_overwritten(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "train.bin").write_bytes(b"precious")
    args = ["prepare", "--source", "jsonl", f"--input={corpus}", f"--out={out}", "--quiet"]
    assert main(args) == 10
    assert "this command did not write it" in capsys.readouterr().err
    assert (out / "train.bin").read_bytes() == b"precious"


def test_two_runs_in_one_folder_at_the_same_time_are_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with locked(out):
        second = run_here("prepare", "--source", "jsonl", "--input", corpus, "--out", out)
    assert second.returncode == 10
    assert second.stderr.endswith(
        f"error: {out}: another prepare is writing to this folder. Wait with --wait, or choose "
        "another --out.\n"
    )
    assert list(out.iterdir()) == []


def open_files(pid: int) -> list[str]:
    return [each.path for each in psutil.Process(pid).open_files()]


@pytest.mark.processes
def test_a_waiting_run_starts_when_the_other_has_ended(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    args = ["--source", "jsonl", "--input", corpus, "--out", out, "--wait"]
    with locked(out):
        waiting = subprocess.Popen(data_command("prepare", *args), cwd=REPOSITORY)
        lock = str(out / ".prepare.lock")
        wait_until(lambda: lock in open_files(waiting.pid), what="it to open the lock's file")
        assert waiting.poll() is None
        assert not (out / "meta.json").exists()
    assert waiting.wait(timeout=DEADLINE_S) == 0
    assert (out / "meta.json").exists()


def test_a_full_disk_is_one_line_and_the_run_can_resume(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["--source", "jsonl", "--input", corpus, "--out", out]

    def full_disk(path: Path, mode: str) -> IO[bytes]:
        return (Path("/dev/full") if path.name == "train.bin.partial" else path).open(mode)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("payload.data.writing.resumable_token_files._open", full_disk)
        full = run_here("prepare", *args, "--quiet")
    assert full.returncode == 10
    assert full.stderr.startswith(f"error: {out}: No space left on device while writing, ")
    assert "run the same command again, without --force" in full.stderr
    assert full.stderr.count("\n") == 1
    assert not (out / "meta.json").exists()
    assert run_here("prepare", *args).returncode == 0


def test_too_small_a_disk_is_noticed_before_writing(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("payload.data.writing.prepare_text.free_bytes", lambda _: 1_000_000)
    args = ["--source", "jsonl", f"--input={corpus}", f"--out={tmp_path / 'out'}", "--quiet"]
    assert main(["prepare", *args]) == 10
    complaint = capsys.readouterr().err
    assert "tokens need about 2.1 MiB, but" in complaint
    assert "976.6 KiB are free" in complaint
    assert not (tmp_path / "out").exists()
