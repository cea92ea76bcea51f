"""Training compares each range of a data folder with meta.json before its first use."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.core.errors import DataError
from payload.data.__main__ import main
from payload.data.reading.blocks import TokenData
from payload.data.reading.range_hashes import RangeHasher
from payload.data.writing.meta import write_meta
from payload.formats.data_folder import RANGE_BYTES, load_meta
from tests.data.running import write_jsonl
from tests.support.data_folders import make_data_folder
from tests.train.alone import train_alone

LENGTH = 1024
BLOCKS_A_RANGE = RANGE_BYTES // (2 * LENGTH)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of four ranges, the last one shorter."""
    made = make_data_folder(tmp_path / "data", num_train_tokens=450_000, vocab_size=512)
    assert len(load_meta(made).files["train.bin"].range_sha256) == 4
    return made


def forget_range_hashes(folder: Path) -> None:
    """Write meta.json in the format of older releases, without hashes of ranges."""
    path = folder / "meta.json"
    raw = json.loads(path.read_text())
    for entry in raw["files"].values():
        del entry["range_sha256"]
    path.write_text(json.dumps(raw))


def read(data: TokenData, *blocks: int) -> None:
    data.train.gather(np.array(blocks, dtype=np.int64))


def fill_with_zeros(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))


def test_the_hashes_do_not_depend_on_how_the_content_came() -> None:
    content = np.random.default_rng(1).bytes(3 * RANGE_BYTES + 5)
    whole, pieces = RangeHasher(), RangeHasher()
    whole.update(content)
    for start in range(0, len(content), 99_991):
        pieces.update(content[start : start + 99_991])
    assert whole.hashes() == pieces.hashes()
    assert len(set(whole.hashes())) == 4


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_file_of_zeros_of_the_same_size_never_trains_to_finished(
    tmp_path: Path, tiny_config: Path, folder: Path, name: str
) -> None:
    fill_with_zeros(folder / name)
    with pytest.raises(
        DataError, match=rf"{name}: the hash of bytes 0 to [\d,]+ differs .* damaged"
    ):
        train_alone(tmp_path / "run", tiny_config, f"data.dir={folder}", "train.steps=3")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_file_that_becomes_zeros_while_a_run_reads_it_ends_the_run(
    tmp_path: Path, tiny_config: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the file was read before, so the step after the change fails."""
    from payload.train.trainer import Trainer

    train_step, seen = Trainer._train_step, []

    def spoiled(self: Trainer) -> bool:
        data = TokenData.open(folder, sequence_length=32)
        read(data, *range(data.train.num_full_blocks()))
        stopping = train_step(self)
        seen.append(self._step)
        if self._step == 2:
            fill_with_zeros(folder / "train.bin")
        return stopping

    monkeypatch.setattr(Trainer, "_train_step", spoiled)
    with pytest.raises(DataError, match=r"train\.bin: the hash of bytes 0 to 262,143 differs"):
        train_alone(tmp_path / "run", tiny_config, f"data.dir={folder}", "train.steps=5")
    assert seen == [1, 2]


def test_a_flipped_bit_is_found_when_its_range_is_read_and_hurts_no_other(folder: Path) -> None:
    with (folder / "train.bin").open("r+b") as file:
        content = bytearray(file.read())
        content[2 * RANGE_BYTES + 1234] ^= 4
        file.seek(0)
        file.write(content)
    data = TokenData.open(folder, sequence_length=LENGTH)
    read(data, 0, BLOCKS_A_RANGE, data.train.num_full_blocks() - 1)
    for block in (2 * BLOCKS_A_RANGE, 3 * BLOCKS_A_RANGE - 1, 2 * BLOCKS_A_RANGE - 1):
        with pytest.raises(DataError, match=r"the hash of bytes 524,288 to 786,431 differs"):
            read(data, block)


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(folder: Path) -> None:
    data = TokenData.open(folder, sequence_length=LENGTH)
    read(data, 0)
    os.truncate(folder / "train.bin", 10)
    with pytest.raises(DataError, match=r"train\.bin: 10 bytes; meta\.json records 900,000"):
        read(data, data.train.num_full_blocks() - 1)


def test_a_range_is_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TokenData.open(folder, sequence_length=LENGTH)
    reads, pread = [], os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        reads.append(offset)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    for _ in range(3):
        read(data, *range(data.train.num_full_blocks()))
    assert sorted(reads) == [RANGE_BYTES * i for i in range(4)]


def test_a_folder_of_an_older_release_still_trains_and_the_run_says_what_to_do(
    tmp_path: Path, tiny_config: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forget_range_hashes(folder)
    with caplog.at_level(logging.INFO):
        train_alone(tmp_path / "run", tiny_config, f"data.dir={folder}", "train.steps=1")
    (note,) = (record.message for record in caplog.records if "no range hashes" in record.message)
    assert note.endswith(f"-m payload.data verify {folder} --add-hashes")


def test_verify_adds_the_hashes_that_an_older_release_did_not_keep(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = load_meta(folder)
    forget_range_hashes(folder)
    assert main(["verify", str(folder)]) == 0
    assert "--add-hashes" in capsys.readouterr().err
    assert main(["verify", str(folder), "--add-hashes"]) == 0
    assert capsys.readouterr().err == ""
    assert load_meta(folder) == expected


def test_no_hashes_are_added_for_a_damaged_file(folder: Path) -> None:
    forget_range_hashes(folder)
    before = (folder / "meta.json").read_bytes()
    fill_with_zeros(folder / "train.bin")
    assert main(["verify", str(folder), "--add-hashes"]) == 10
    assert (folder / "meta.json").read_bytes() == before


def test_verify_says_which_part_differs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "train.bin").open("r+b") as file:
        file.seek(RANGE_BYTES)
        file.write(b"\xff\xff")
    assert main(["verify", str(folder)]) == 10
    assert "(within bytes 262,144 to 524,287: 1 of 4 ranges)" in capsys.readouterr().err


def test_prepare_writes_the_hashes_also_after_it_was_stopped(tmp_path: Path) -> None:
    texts = [f"document {i} " + "word " * 5000 for i in range(120)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    out = tmp_path / "data"
    assert main(["prepare", "--source", "jsonl", f"--input={source}", f"--out={out}"]) == 0
    meta = load_meta(out)
    assert len(meta.files["train.bin"].range_sha256) > 1
    stripped = {name: replace(file, range_sha256=()) for name, file in meta.files.items()}
    write_meta(out, replace(meta, files=stripped))
    assert main(["verify", str(out), "--add-hashes"]) == 0
    assert load_meta(out) == meta


_HOSTILE: list[Any] = [
    None, True, -1, 2**63, 10**30, 1.5, 1e308, "", "x", "../../x", "/etc/passwd", "\x1b[2J", "\n",
    "a" * 70_000, [], [[]], [None], {}, {"a": {}}, [1] * 1000, "uint16\n", "uint8", "é", "\u202e",
    0, {"train.bin": None}, {"../../x": {"bytes": 1, "sha256": "0" * 64}}, ["x"], [{}], -0.0,
]  # fmt: skip


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "dtype", "train_tokens", "val_tokens", "split", "files", "skipped_examples"],
)
def test_hostile_values_in_meta_json_are_refused_in_one_line(folder: Path, key: str) -> None:
    path = folder / "meta.json"
    good = json.loads(path.read_text())
    for value in _HOSTILE:
        if key == "skipped_examples" and value in ([], ["x"]):
            continue
        if key == "vocab_size" and type(value) is int and 0 < value < 2**32:
            continue
        path.write_text(json.dumps(good | {key: value}))
        with pytest.raises(DataError) as raised:
            load_meta(folder)
        assert "\n" not in str(raised.value) and "\x1b" not in str(raised.value)


@pytest.mark.parametrize("key", ["bytes", "sha256", "range_sha256"])
def test_hostile_values_of_a_file_in_meta_json_are_refused_in_one_line(
    folder: Path, key: str
) -> None:
    path = folder / "meta.json"
    good = json.loads(path.read_text())
    for value in _HOSTILE:
        if key == "range_sha256" and value == []:
            continue
        good["files"]["train.bin"] |= {key: value}
        path.write_text(json.dumps(good))
        with pytest.raises(DataError) as raised:
            load_meta(folder)
        assert "\n" not in str(raised.value) and "\x1b" not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"[" * 20_000, b"9" * 4300, b"Infinity", b"[]", b"null", b'"x"',
        b'{"schema_version": true}', b'{"schema_version": 1}',
    ],
)  # fmt: skip
def test_damaged_meta_json_is_one_error(folder: Path, content: bytes) -> None:
    (folder / "meta.json").write_bytes(content)
    with pytest.raises(DataError, match=r"meta\.json.*--force"):
        load_meta(folder)


def test_what_is_in_the_place_of_meta_json_is_one_error(folder: Path) -> None:
    (folder / "meta.json").unlink()
    os.mkfifo(folder / "meta.json")
    with pytest.raises(DataError, match=r"meta\.json: cannot be read \(Not a regular file\)"):
        load_meta(folder)
