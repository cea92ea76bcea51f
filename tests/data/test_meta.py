"""meta.json, and the errors for a data folder that cannot be used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import DataError
from payload.data.__main__ import main
from payload.data.writing.meta import verify_files
from payload.data.writing.resumable_token_files import GrowingFile, partial_path
from payload.formats.data_folder import load_meta, token_dtype
from tests.data.running import write_jsonl


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(20)])
    out = tmp_path / "data"
    assert main(["prepare", "--source", "jsonl", f"--input={source}", f"--out={out}"]) == 0
    return out


def test_missing_folder_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prepare --source openwebtext --out .*/openwebtext$"):
        load_meta(tmp_path / "openwebtext")


def test_no_source_is_named_for_a_folder_whose_name_does_not_say_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prepare --source KIND --input PATH --out .*/mine \("):
        load_meta(tmp_path / "mine")


@pytest.mark.parametrize("name", ["mine", "stdlib"])
def test_a_damaged_folder_of_ones_own_text_is_to_be_made_from_that_again(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder.rename(folder.with_name(name))
    again = ["prepare", "--source", "jsonl", f"--input={folder.parent / 'a.jsonl'}"]
    (folder / "val.bin").write_bytes(b"12")
    remedy = (
        "Repeat the command that made this folder, with the option --force (source: "
        f"{load_source(folder)})."
    )
    for args in (["verify", str(folder)], [*again, f"--out={folder}", "--quiet"]):
        assert main(args) == 10
        error = capsys.readouterr().err
        assert error.endswith(f"{remedy}\n")
        assert "--source" not in error


def load_source(folder: Path) -> str:
    return str(json.loads((folder / "meta.json").read_text())["source"])


def test_unfinished_folder_says_so(folder: Path) -> None:
    (folder / "meta.json").unlink()
    with pytest.raises(DataError, match="it is incomplete"):
        load_meta(folder)


def test_short_file_is_noticed_without_reading_it(folder: Path) -> None:
    (folder / "val.bin").write_bytes(b"12")
    with pytest.raises(DataError, match=r"val\.bin: the file has 2 bytes, but meta\.json lists"):
        load_meta(folder)


def test_lost_file_is_noticed(folder: Path) -> None:
    (folder / "train.bin").unlink()
    with pytest.raises(DataError, match=r"train\.bin: No such file .*, but meta\.json lists it"):
        load_meta(folder)


def test_changed_byte_is_found_by_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder)]) == 0
    content = bytearray((folder / "train.bin").read_bytes())
    content[7] ^= 1
    (folder / "train.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"train\.bin: sha256 is"):
        verify_files(folder, load_meta(folder))
    assert main(["verify", str(folder)]) == 10
    assert capsys.readouterr().err.count("error: ") == 1


def test_a_hash_of_a_range_that_is_wrong_in_meta_json_is_named(folder: Path) -> None:
    meta = load_meta(folder)
    file = meta.files["train.bin"]
    wrong = replace(file, range_sha256=("0" * len(file.range_sha256[0]), *file.range_sha256[1:]))
    meta = replace(meta, files={**meta.files, "train.bin": wrong})
    with pytest.raises(DataError, match=r"train\.bin: its hashes in meta\.json contradict each"):
        verify_files(folder, meta)


def test_an_unfinished_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    partial_path(tmp_path, "train.bin").write_bytes(b"1234")
    with pytest.raises(DataError, match=r"has 4 bytes, but \.prepare\.jsonl lists 8"):
        GrowingFile(tmp_path, "train.bin", keep_bytes=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "schema_version is 99, but this release reads 1"),
        ({"split": None}, "split: expected an object, got None"),
        ({"files": {"train.bin": {}}}, "missing: bytes, sha256"),
    ],
)
def test_malformed_meta_is_refused(folder: Path, change: dict[str, object], message: str) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=message):
        load_meta(folder)


def test_cut_off_meta_is_refused(folder: Path) -> None:
    path = folder / "meta.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(DataError, match=r"meta\.json: not JSON"):
        load_meta(folder)


def test_tokens_are_two_bytes_up_to_65536_of_them() -> None:
    assert token_dtype(50257) == "uint16"
    assert token_dtype(65536) == "uint16"
    assert token_dtype(65537) == "uint32"
