"""Bad input ends in one clear line with file and position, or in a counted skip."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from payload.data.__main__ import main
from payload.formats.data_folder import load_meta
from tests.data.running import write_jsonl

GOOD = [f"document number {i}" for i in range(20)]


def jsonl_with(line: bytes) -> Callable[[Path], list[str]]:
    """Return a maker of a file whose third line is `line`."""

    def make(folder: Path) -> list[str]:
        lines = write_jsonl(folder / "in.jsonl", GOOD).read_bytes().splitlines(keepends=True)
        lines[2] = line + b"\n"
        (folder / "in.jsonl").write_bytes(b"".join(lines))
        return ["--source", "jsonl", "--input", str(folder / "in.jsonl")]

    return make


def jsonl_holding(content: bytes, name: str = "in.jsonl") -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / name).write_bytes(content)
        return ["--source", "jsonl", "--input", str(folder / name)]

    return make


def parquet_holding(table: pa.Table, *more: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        pq.write_table(table, folder / "in.parquet")
        return ["--source", "parquet", "--input", str(folder / "in.parquet"), *more]

    return make


def broken_parquet(folder: Path) -> list[str]:
    pq.write_table(pa.table({"text": GOOD}), folder / "a.parquet")
    (folder / "in.parquet").write_bytes(b"PAR1 and then nothing of use")
    return ["--source", "parquet", "--input", str(folder / "a.parquet"), str(folder / "in.parquet")]


def parquet_with_broken_footer(folder: Path) -> list[str]:
    for name in ("a.parquet", "in.parquet"):
        pq.write_table(pa.table({"text": GOOD}), folder / name)
    content = bytearray((folder / "in.parquet").read_bytes())
    footer_bytes = int.from_bytes(content[-8:-4], "little")
    content[-8 - footer_bytes : -8] = b"\xff" * footer_bytes
    (folder / "in.parquet").write_bytes(content)
    return ["--source", "parquet", "--input", str(folder)]


def parquet_with_broken_page(folder: Path) -> list[str]:
    pq.write_table(
        pa.table({"text": [f"{i} {text}" for i in range(100) for text in GOOD]}),
        folder / "in.parquet",
        compression="zstd",
        use_dictionary=False,
        row_group_size=500,
    )
    content = bytearray((folder / "in.parquet").read_bytes())
    place = len(content) // 2
    content[place : place + 500] = b"\x55" * 500
    (folder / "in.parquet").write_bytes(content)
    return ["--source", "parquet", "--input", str(folder / "in.parquet")]


def text_not_utf8(folder: Path) -> list[str]:
    for number, text in enumerate(GOOD):
        (folder / f"{number}.txt").write_text(text)
    (folder / "in.txt").write_bytes(b"first\nsecond caf\xe9\n")
    return ["--source", "text", "--input", str(folder)]


def text_with_broken_link(folder: Path) -> list[str]:
    for number, text in enumerate(GOOD):
        (folder / f"{number}.txt").write_text(text)
    (folder / "in.txt").symlink_to(folder / "gone.txt")
    return ["--source", "text", "--input", str(folder)]


def text_with_pipe(folder: Path) -> list[str]:
    for number, text in enumerate(GOOD):
        (folder / f"{number}.txt").write_text(text)
    os.mkfifo(folder / "in.txt")
    return ["--source", "text", "--input", str(folder)]


def text_with_a_name_that_is_not_utf8(folder: Path) -> list[str]:
    for number, text in enumerate(GOOD):
        (folder / f"{number}.txt").write_text(text)
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_bytes(b"\xe9")
    return ["--source", "text", "--input", str(folder)]


def jsonl_folder_with_pipe(folder: Path) -> list[str]:
    write_jsonl(folder / "a.jsonl", GOOD)
    os.mkfifo(folder / "in.jsonl")
    return ["--source", "jsonl", "--input", str(folder)]


def invalid_utf8_column() -> pa.Table:
    good = [text.encode() for text in GOOD]
    raw = pa.array([*good[:4], b"caf\xe9", *good[4:]], type=pa.binary())
    return pa.table({"text": pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())})


def slowly(*values: object) -> Any:
    """Return a case of `make test-all`: another process reads each parquet file."""
    return pytest.param(*values, marks=pytest.mark.slow)


SKIPPABLE = [
    (jsonl_with(b'{"text": "half'), r"in.jsonl line 3: not JSON: "),
    (jsonl_with(b'{"body": "x"}'), r"line 3: no key 'text'; its keys: 'body'"),
    (jsonl_with(b'{"text": 7}'), r"line 3: 'text' is int, not text"),
    (jsonl_with(b'["x"]'), r"line 3: not an object but list"),
    (jsonl_with(b'{"text": "caf\xe9"}'), r"line 3: byte 13 of the line (0xe9) is not UTF-8"),
    (jsonl_with(b"[" * 100_000), r"line 3: the JSON is nested too deeply"),
    (text_not_utf8, r"in.txt line 2: byte 16 (0xe9) is not UTF-8"),
    (parquet_holding(pa.table({"text": [*GOOD[:4], None, *GOOD]})), r"row 5: no text (null)"),
    slowly(parquet_holding(invalid_utf8_column()), r"row 5: not UTF-8"),
    (broken_parquet, r"in.parquet: not a readable parquet or Arrow file: "),
    slowly(parquet_with_broken_footer, r"in.parquet: not a readable parquet or Arrow file: "),
    (text_with_broken_link, r"in.txt: No such file or directory"),
    (text_with_pipe, r"in.txt: not a regular file"),
    (parquet_with_broken_page, r"in.parquet rows 1001 to 1500: damaged: "),
]

FATAL = [
    (
        lambda folder: ["--source", "text", "--input", str(folder / "no")],
        "does not exist. Check --input",
    ),
    (lambda folder: ["--source", "text", "--input", str(folder)], "no file matches '*'"),
    (jsonl_holding(b""), "0 documents; training and validation need at least 2"),
    (jsonl_holding(b"\n\n \n"), "0 documents; training and validation need at least 2"),
    (jsonl_holding(b'{"text": "x"}\n'), "1 document; training and validation need at least 2"),
    (jsonl_holding(b'{"text": ""}\n' * 3), "all 3 documents of jsonl: "),
    (jsonl_holding(gzip.compress(b"{}" * 9999)[:40], "in.jsonl.gz"), "damaged gzip file"),
    (jsonl_folder_with_pipe, "in.jsonl: not a regular file"),
    (jsonl_holding(gzip.compress(b""), "in.jsonl.gz"), "no documents in jsonl: "),
    (parquet_holding(pa.table({"essay": GOOD})), "no column 'text'; its columns: 'essay'"),
    slowly(parquet_holding(pa.table({"text": [1, 2, 3]})), "column 'text' is int64, not text"),
]


HOSTILE_NAME = "a\nb\x1b]52;c;eA==\x07" + "x" * 20_000


@pytest.mark.processes
@pytest.mark.parametrize(
    "make",
    [
        jsonl_with(json.dumps({HOSTILE_NAME: "x"}).encode()),
        jsonl_with(json.dumps({f"{HOSTILE_NAME}{i}": "x" for i in range(100)}).encode()),
        parquet_holding(pa.table({HOSTILE_NAME: GOOD})),
        slowly(parquet_holding(pa.table({f"{i}{HOSTILE_NAME}": GOOD for i in range(100)}))),
        slowly(parquet_holding(pa.table({"text": [{HOSTILE_NAME: 1}] * 9}))),
    ],
)
def test_names_of_20_000_characters_in_a_source_are_quoted_in_short_on_one_line(
    make: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    assert main(["prepare", *make(tmp_path / "in"), "--quiet", f"--out={tmp_path / 'out'}"]) == 10
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1 and complaint.rstrip("\n").isprintable()
    assert len(complaint.replace(str(tmp_path), "")) < 700


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("make", "message"), SKIPPABLE)
def test_bad_document_stops_with_its_place_or_is_counted(
    make: Callable[[Path], list[str]],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in").mkdir()
    args = ["prepare", *make(tmp_path / "in"), "--quiet", f"--out={tmp_path / 'out'}"]

    assert main(args) == 10
    complaint = capsys.readouterr().err
    assert message in complaint
    assert "--skip-bad" in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "out").exists()

    assert main([*args, "--skip-bad"]) == 0
    meta = load_meta(tmp_path / "out")
    assert meta.skipped_documents >= 1
    assert message in meta.skipped_examples[0]
    assert message in capsys.readouterr().out
    assert meta.train_documents + meta.val_documents >= len(GOOD) - 1


@pytest.mark.processes
@pytest.mark.parametrize(("make", "message"), FATAL)
def test_input_without_documents_stops_even_with_skip_bad(
    make: Callable[[Path], list[str]],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in").mkdir()
    args = ["prepare", *make(tmp_path / "in"), "--quiet", f"--out={tmp_path / 'out'}"]
    assert main([*args, "--skip-bad"]) == 10
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.startswith("error: ")
    assert complaint.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_when_all_documents_are_bad_their_number_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("no\n" * 5)
    args = ["--source", "jsonl", f"--input={source}", f"--out={tmp_path / 'out'}", "--skip-bad"]
    assert main(["prepare", *args]) == 10
    assert "all 5 were bad" in capsys.readouterr().err


def test_a_bad_file_whose_name_is_not_utf8_is_shown(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    args = [*text_with_a_name_that_is_not_utf8(tmp_path / "in"), "--skip-bad", "--quiet"]
    # Strict, like stdout in all locales except C.
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    with redirect_stdout(out):
        assert main(["prepare", *args, f"--out={tmp_path / 'out'}"]) == 0
    out.seek(0)
    assert r"caf\udce9.txt line 1: byte 0 (0xe9) is not UTF-8" in out.read()


def test_lone_surrogate_becomes_a_replacement_character(tmp_path: Path) -> None:
    from tests.data.running import read_bin, reference_tokens

    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"text": "a\ud800b"}) + "\n" + '{"text": "c"}\n')
    args = ["--source", "jsonl", f"--input={source}", f"--out={tmp_path / 'out'}", "--quiet"]
    assert main(["prepare", *args]) == 0
    found = {tuple(read_bin(tmp_path / "out" / name)) for name in ("train.bin", "val.bin")}
    assert found == {tuple(reference_tokens([text])) for text in ("a\ufffdb", "c")}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--source", "stdlib", "--input", "x"], "Leave out --input"),
        (["--source", "hf"], "needs exactly one --input"),
        (["--source", "text"], "needs --input"),
        (["--source", "openwebtext", "--input", "a", "b"], "at most one --input"),
        (["--source", "stdlib", "--glob", "*"], "--glob cannot be used with --source stdlib"),
        (["--source", "text", "--input", __file__, "--glob", "*"], "selects files of a folder"),
        (
            ["--source", "stdlib", "--revision", "main"],
            "--revision cannot be used with --source stdlib, only",
        ),
        (
            ["--source", "parquet", "--input", "a", "--split", "b"],
            "--split cannot be used with --source parquet",
        ),
        (["--source", "text", "--input", "a", "--text-column", "b"], "which reads whole files"),
        (["--source", "stdlib", "--text-column", "text"], "which reads whole files"),
        (["--source", "hf", "--input", "tests", "--revision", "main"], "tests is a local folder"),
        (["--source", "hf", "--input", "a/b/c/d"], "neither a folder nor a dataset's name"),
        (["--source", "hf", "--input", __file__], "is a file; --source hf needs a folder"),
    ],
)
def test_flags_that_do_not_go_together_are_usage_errors(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", *args, f"--out={tmp_path / 'out'}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "args",
    [
        ["--val-fraction", "2"],
        ["--val-fraction", "nan"],
        ["--seed", "-1"],
        ["--max-documents", "0"],
        ["--shard-mib", "x"],
        ["--source", "nope"],
    ],
)
def test_values_out_of_range_are_usage_errors(
    args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prepare", "--source", "stdlib", f"--out={tmp_path / 'out'}", *args])
    assert ended.value.code == 2
    assert args[0] in capsys.readouterr().err
