"""Files of every common format are read through `prepare`, whatever their names are."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import DataError, ExitCode, UsageError
from payload.data.rows.named_columns import NamedColumns
from payload.data.rows.open_rows import open_rows
from payload.data.sources.file_format import detect_format
from payload.data.sources.source_flags import SourceRequest
from payload.formats.data_folder import load_meta
from tests.data.running import read_bin, reference_tokens, run_here
from tests.support.chat_data import make_tokenizer, turn, write_rows

ROWS = [
    {"question": f"Wie groß ist {number}; und „{number}“?", "answer": f"Größe | {number},\n\tok"}
    for number in range(30)
]


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table(delimiter: str, rows: Sequence[Mapping[str, Any]] = ROWS) -> str:
    """Return a table that quotes every field of the rows."""

    def quoted(text: object) -> str:
        return '"' + str(text).replace('"', '""') + '"'

    body = [delimiter.join(map(quoted, row.values())) for row in rows]
    return "\r\n".join([delimiter.join(rows[0]), *body]) + "\r\n"


def zstd(content: bytes) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def arrow_stream(path: Path) -> None:
    import pyarrow as pa

    made = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, made.schema) as writer:
        writer.write_table(made)


def arrow_file(path: Path) -> None:
    import pyarrow as pa

    made = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, made.schema) as writer:
        writer.write_table(made, max_chunksize=7)


def parquet(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), path)


def latin(text: str) -> bytes:
    return text.encode("cp1252")


WRITERS: dict[str, tuple[str, bytes | Callable[[Path], None], str]] = {
    "lines": ("x.jsonl", lines(ROWS).encode(), "JSON Lines, UTF-8"),
    "lines in .txt": ("x.txt", lines(ROWS).encode(), "JSON Lines, UTF-8"),
    "lines in .bak": ("x.jsonl.bak", lines(ROWS).encode(), "JSON Lines, UTF-8"),
    "lines in .jsonlines": ("x.jsonlines", lines(ROWS).encode(), "JSON Lines, UTF-8"),
    "lines with a BOM": ("x.ndjson", lines(ROWS).encode("utf-8-sig"), "JSON Lines, UTF-8 with BOM"),
    "lines in UTF-16": ("x.jsonl", lines(ROWS).encode("utf-16"), "JSON, UTF-16"),
    "gzip": ("x.jsonl.gz", gzip.compress(lines(ROWS).encode()), "compressed with gzip"),
    "gzip by content": ("x.jsonl", gzip.compress(lines(ROWS).encode()), "compressed with gzip"),
    "bzip2": ("x.jsonl.bz2", bz2.compress(lines(ROWS).encode()), "compressed with bzip2"),
    "xz": ("x.jsonl.xz", lzma.compress(lines(ROWS).encode()), "compressed with xz"),
    "zstd": ("x.jsonl.zst", zstd(lines(ROWS).encode()), "compressed with zstd"),
    "array": ("x.json", json.dumps(ROWS, indent=1).encode(), "JSON, UTF-8"),
    "array on one line": ("x.json", json.dumps(ROWS).encode(), "JSON, UTF-8"),
    "array under data": ("x.json", json.dumps({"data": ROWS, "version": 1}).encode(), "JSON"),
    "objects of several lines": (
        "x.json",
        "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(),
        "JSON, UTF-8",
    ),
    "array with gzip": ("x.json.gz", gzip.compress(json.dumps(ROWS).encode()), "with gzip"),
    "csv": ("x.csv", table(",").encode(), "CSV, delimiter comma, UTF-8"),
    "Excel": ("x.csv", latin(table(";")), "CSV, delimiter semicolon, Windows-1252 (Latin-1)"),
    "Excel with sep=": ("x.csv", ("sep=;\r\n" + table(";")).encode(), "delimiter semicolon"),
    "csv with a BOM": ("x.csv", table(";").encode("utf-8-sig"), "UTF-8 with BOM"),
    "csv in UTF-16": ("x.csv", table("\t").encode("utf-16"), "CSV, delimiter tab, UTF-16"),
    "tsv": ("x.tsv", table("\t").encode(), "CSV, delimiter tab, UTF-8"),
    "pipes": ("x.csv", table("|").encode(), "CSV, delimiter pipe, UTF-8"),
    "csv in .txt": ("x.txt", table(",").encode(), "CSV, delimiter comma, UTF-8"),
    "csv with gzip": ("x.csv.gz", gzip.compress(table(",").encode()), "compressed with gzip"),
    "parquet": ("x.parquet", parquet, "parquet"),
    "parquet without suffix": ("x", parquet, "parquet"),
    "arrow stream": ("x.arrow", arrow_stream, "Arrow"),
    "arrow file": ("x.arrow", arrow_file, "Arrow"),
}


def write(folder: Path, name: str, content: bytes | Callable[[Path], None]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    return path


@pytest.mark.parametrize(
    "name",
    [
        # A process reads parquet and Arrow.
        pytest.param(name, marks=[pytest.mark.processes] if callable(content) else [])
        for name, (_, content, _) in WRITERS.items()
    ],
)
def test_the_rows_of_a_file_are_read_by_its_content(name: str, tmp_path: Path) -> None:
    file, content, format_name = WRITERS[name]
    source = open_rows(SourceRequest(kind="auto", inputs=(str(write(tmp_path, file, content)),)))
    source.identity()
    assert [dict(row.values) for row in source.read()] == ROWS
    (found,) = source.recognised()
    assert found.startswith("format: ") and format_name in found


@pytest.mark.processes
def test_the_format_is_printed_and_excel_s_table_is_trained(tmp_path: Path) -> None:
    path = write(tmp_path, "x.csv", latin(table(";")))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    words = ("--tokenizer", tokenizer, "--sequence-length", 128, "--out", tmp_path / "out")
    done = run_here("prepare", "--task", "chat", "--input", path, *words)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "format: CSV, delimiter semicolon, Windows-1252 (Latin-1)\n" in done.stderr
    shown = run_here("show", tmp_path / "out").stdout
    assert "Wie groß ist" in shown and "⟦Größe | " in shown


@pytest.mark.processes
@pytest.mark.parametrize("name", ["array", "csv", "arrow stream", "lines in .txt", "zstd"])
def test_plain_text_is_trained_from_a_column_of_any_table(name: str, tmp_path: Path) -> None:
    file, content, _ = WRITERS[name]
    path = write(tmp_path, file, content)
    words = ("--text-column", "answer", "--val-fraction", 0.2, "--out", tmp_path / "out", "--quiet")
    done = run_here("prepare", "--input", path, *words)
    assert done.returncode == ExitCode.OK, done.stderr
    meta = load_meta(tmp_path / "out")
    assert (meta.train_documents, meta.val_documents) == (24, 6)
    expected = reference_tokens([str(row["answer"]) for row in ROWS])
    found = [*read_bin(tmp_path / "out/train.bin"), *read_bin(tmp_path / "out/val.bin")]
    assert sorted(found) == sorted(expected.tolist())


def test_a_folder_of_arrays_is_rows_and_its_readme_is_not(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / "in", f"{name}.json", json.dumps(ROWS).encode())
    write(tmp_path / "in", "README.md", b"# About\n\nA data set, in German.\n")
    source = open_rows(SourceRequest(kind="auto", inputs=(str(tmp_path / "in"),)))
    source.identity()
    assert len(list(source.read())) == 2 * len(ROWS)
    assert source.recognised() == [
        "format: JSON, UTF-8 (2 files)",
        "not read, because they have no rows: README.md",
    ]


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("x.txt", "Dear Ada,\n\nthank you, and see you soon.\n", "text"),
        ("x.txt", "one, two\nthree, four\n", "text"),
        ("x.md", "[link] and { braces }\n", "text"),
        ("x.txt", "", "text"),
        ("x.csv", "text\na\nb\n", "csv"),
        ("x.jsonl", "{broken\n", "jsonl"),
        ("x", '{"a": 1}\n{"a": 2}\n', "jsonl"),
        ("x", '{"messages": [{"role": "user"}]}', "jsonl"),
        ("x", '{\n "messages": []\n}', "json"),
    ],
)
def test_text_is_not_taken_for_a_table(name: str, content: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert detect_format(tmp_path / name).kind == kind


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"PK\x03\x04....", "a zip file, such as .xlsx or .docx, which is not supported. Save"),
        (b"%PDF-1.7", "a PDF, which is not supported. Convert the file to text"),
        (b"SQLite format 3\0", "an SQLite database, .* Export the table as CSV"),
        (b"\0\1\2", "a binary file of an unknown format"),
    ],
)
def test_a_binary_file_is_refused_by_content_with_a_fix(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=problem):
        detect_format(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a": 1},\n{"a": 2,\n]', "line 3: not JSON"),
        ('[{"a": 1}\n{"a": 2}]', "line 2: not JSON: the character '{' instead of ',' or ']'"),
        ('[{"a": 1},\n', "line 2: not JSON"),
        ('[{"a": 1, "a": 2}]', "the key 'a' is repeated"),
        ('{"data": [{"a": 1}], "test": [{"a": 2}]}', "a second array, 'test', after 'data'"),
        ("[{}, 7]", "line 1: not an object but int"),
    ],
)
def test_a_fault_in_an_array_is_named_with_its_line(
    text: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_text(text)
    source = open_rows(SourceRequest(kind="auto", inputs=(str(tmp_path / "x.json"),)))
    source.identity()
    with pytest.raises(DataError) as caught:
        list(source.read())
    assert problem in str(caught.value)


def test_an_array_is_read_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("payload.data.sources.json_values._READ_CHARS", 64)
    path = write_rows(tmp_path / "x.json", [])
    rows = [{"question": "q" * size, "answer": [size, -1.5e3, None]} for size in range(300)]
    path.write_text(json.dumps(rows))
    source = open_rows(SourceRequest(kind="auto", inputs=(str(path),)))
    source.identity()
    reading = source.read()
    assert dict(next(reading).values) == rows[0]
    path.write_text("")  # what follows is not read before it is needed
    with pytest.raises(DataError):
        list(reading)


def splits(folder: Path, names: Mapping[str, int]) -> Path:
    for name, count in names.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, [{"messages": turn(f"{name} {n}", "b")} for n in range(count)])
    return folder


@pytest.mark.parametrize(
    ("names", "expected", "first_val"),
    [
        ({"train.jsonl": 3, "valid.jsonl": 2, "test.jsonl": 4}, ["train", "valid"], 3),
        ({"train.jsonl": 3, "dev.jsonl": 2}, ["train", "dev"], 3),
        ({"a_train.jsonl": 3, "a_validation.jsonl": 2}, ["a_train", "a_validation"], 3),
        ({"eval.jsonl": 3, "training.jsonl": 2}, ["training", "eval"], 2),
        ({"train/0.jsonl": 3, "val/0.jsonl": 2, "test/0.jsonl": 1}, ["train/0", "val/0"], 3),
        ({"train-00000-of-00002.jsonl": 1, "train-00001-of-00002.jsonl": 1, "test.jsonl": 1},
         ["train-00000-of-00002", "train-00001-of-00002"], None),
        ({"train.jsonl": 3, "more.jsonl": 1, "test.jsonl": 2}, ["more", "train"], None),
        ({"test.jsonl": 3, "valid.jsonl": 2}, ["test", "valid"], None),
        ({"chats.jsonl": 3, "test.jsonl": 2}, ["chats"], None),
        ({"chats.jsonl": 3, "valid.jsonl": 2}, ["chats", "valid"], 3),
        ({"train.jsonl": 3, "test1.jsonl": 1, "tests.jsonl": 1, "testset.jsonl": 1},
         ["train"], None),
        ({"train/0.jsonl": 3, "dev/a/0.jsonl": 2, "test/a/b/0.jsonl": 1},
         ["train/0", "dev/a/0"], 3),
        ({"test/a/0.jsonl": 3, "test/b/0.jsonl": 2}, ["test/a/0", "test/b/0"], None),
        ({"a.jsonl": 3, "b.jsonl": 2}, ["a", "b"], None),
        ({"myTest.jsonl": 1, "holdout.jsonl": 1, "heldout2.jsonl": 1, "held-out.jsonl": 1,
          "hold_out.jsonl": 1, "a(test).jsonl": 1, "2024test.jsonl": 1, "XTestData.jsonl": 1,
          "devtest.jsonl": 1, "train.jsonl": 3}, ["train"], None),
        ({"train/0.jsonl": 3, "held-out/0.jsonl": 2}, ["train/0"], None),
        ({"contest.jsonl": 1, "latest.jsonl": 1, "attestation.jsonl": 1, "greatestHits.jsonl": 1,
          "Testimony.jsonl": 1, "trainee.jsonl": 1, "devices.jsonl": 1},
         ["Testimony", "attestation", "contest", "devices", "greatestHits", "latest", "trainee"],
         None),
        ({"myVal.jsonl": 2, "myTrain.jsonl": 3}, ["myTrain", "myVal"], 3),
    ],
)  # fmt: skip
def test_the_names_of_files_declare_splits(
    names: Mapping[str, int], expected: Sequence[str], first_val: int | None, tmp_path: Path
) -> None:
    folder = splits(tmp_path / "in", names)
    source = open_rows(SourceRequest(kind="auto", inputs=(str(folder),)))
    source.identity()
    asked = [str(row.values["messages"][0]["content"]) for row in source.read()]
    files = list(dict.fromkeys(text.partition(".jsonl")[0] for text in asked))
    assert files == list(expected)
    assert source.first_val == first_val


@pytest.mark.processes
def test_the_validation_file_validates_and_the_test_file_is_not_opened(tmp_path: Path) -> None:
    names = {"train.jsonl": 30, "valid.jsonl": 20, "test.jsonl": 1}
    folder = splits(tmp_path / "in", names)
    (folder / "test.jsonl").write_bytes(b"\0not even JSON")
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    words = ["prepare", "--task", "chat", "--input", folder, "--tokenizer", tokenizer]
    words += ["--sequence-length", 64, "--out", tmp_path / "out"]
    done = run_here(*words)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "valid for validation: valid.jsonl; test left out: test.jsonl" in done.stderr
    meta = load_meta(tmp_path / "out")
    assert (meta.split.method, meta.split.val_fraction) == ("files", 0.4)
    assert (meta.train_documents, meta.val_documents) == (30, 20)
    for split, count in (("train", 30), ("val", 20)):
        for number in (0, count - 1):
            shown = run_here("show", tmp_path / "out", "--split", split, "--sample", number).stdout
            assert ("valid.jsonl" in shown) is (split == "val")
    again = run_here(*words, "--force", "--val-fraction", 0.1)
    assert again.returncode != ExitCode.OK
    assert "the names of the files declare the validation data" in again.stderr


@pytest.mark.processes
@pytest.mark.parametrize("task", ["text", "classify", "preference"])
@pytest.mark.parametrize(
    "kind", ["jsonl", *(pytest.param(each, marks=pytest.mark.slow) for each in ("csv", "jsonl.gz"))]
)
def test_every_task_has_the_splits_of_the_files(task: str, kind: str, tmp_path: Path) -> None:
    for name, count in (("train", 30), ("valid", 20), ("test", 10)):
        rows = [
            {"text": f"{name} {n}", "label": "ab"[n % 2], "prompt": f"p{n}", "chosen": "good",
             "rejected": "bad"}
            for n in range(count)
        ]  # fmt: skip
        if task != "preference":
            rows = [{key: row[key] for key in ("text", "label")} for row in rows]
        else:
            rows = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]
        content = table(",", rows) if kind == "csv" else lines(rows)
        raw = content.encode()
        write(tmp_path / "in", f"{name}.{kind}", gzip.compress(raw) if "gz" in kind else raw)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    words = ["prepare", "--task", task, "--input", tmp_path / "in", "--tokenizer", tokenizer]
    done = run_here(*words, "--out", tmp_path / "out")
    assert done.returncode == ExitCode.OK, done.stderr
    meta = load_meta(tmp_path / "out")
    assert meta.split.method == "files"
    assert (meta.train_documents, meta.val_documents) == (30, 20)
    assert "test left out" in done.stderr


def test_columns_get_other_names_and_keys_are_ignored(tmp_path: Path) -> None:
    rows = [{"title": "t", "q": "a", "a": "b", "image": "x.jpg", "id": 1} for _ in range(4)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    named = (("title", "user"), ("q", "user"), ("a", "assistant"))
    source = open_rows(
        SourceRequest(kind="auto", inputs=(str(path),), columns=named, ignored_keys=("image",))
    )
    source.identity()
    assert [dict(row.values) for row in source.read()] == [
        {"id": 1, "user": "t\n\na", "assistant": "b"}
    ] * 4
    assert "note: keys ignored by --ignore-key: 'image' (4 rows)" in source.notes()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "in the first 20 rows, the task does not read these columns: 'image' (20 rows)"),
        (("--ignore-key", "image"), None),
        (("--columns", "pic=user"), "no row has the column 'pic'; the columns are 'messages'"),
    ],
)
def test_a_column_that_nothing_reads_stops_before_anything_is_written(
    words: tuple[str, ...], problem: str | None, tmp_path: Path
) -> None:
    rows = [{"messages": turn("a", "b"), "image": "x.jpg", "source": "web"} for _ in range(20)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    base = ("prepare", "--task", "chat", "--input", path, "--tokenizer", tokenizer)
    done = run_here(*base, "--sequence-length", 64, "--out", tmp_path / "out", *words)
    assert (done.returncode == ExitCode.OK) is (problem is None), done.stderr
    assert (tmp_path / "out").exists() is (problem is None)
    assert problem is None or problem in done.stderr
    if problem is None:
        assert "'image' (20 rows)" in done.stderr and "'source' (20 rows)" in done.stderr


@pytest.mark.processes
def test_rows_with_label_false_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "bad" if n % 2 else "good", "label": n % 2 == 0}
        for n in range(40)
    ]
    path = write_rows(tmp_path / "x.jsonl", rows)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    words = ("--tokenizer", tokenizer, "--sequence-length", 64, "--out", tmp_path / "out")
    done = run_here("prepare", "--task", "chat", "--input", path, *words)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "note: left out 20 rows: label = False marks a bad answer\n" in done.stderr
    meta = load_meta(tmp_path / "out")
    assert meta.train_documents + meta.val_documents == 20
    for number in range(3):
        assert "bad" not in run_here("show", tmp_path / "out", "--sample", number).stdout


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.processes
@pytest.mark.parametrize("as_text", [False, True])
def test_a_row_that_is_nested_deeply_is_a_bad_row(as_text: bool, tmp_path: Path) -> None:
    good = {"messages": turn("a", "b")}
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested(800)}}]
    bad = {**good, "tools": json.dumps(tools) if as_text else tools}
    path = write_rows(tmp_path / "in.jsonl", [bad, *[good] * 20])
    folder = make_tokenizer(tmp_path / "model")
    words = ("prepare", "--task", "chat", "--input", path, "--tokenizer", folder)
    done = run_here(*words, "--out", tmp_path / "a")
    assert done.returncode == ExitCode.CONFIG
    (line,) = (each for each in done.stderr.splitlines() if each.startswith("error: "))
    assert f"{path} line 1: " in line
    done = run_here(*words, "--out", tmp_path / "b", "--skip-bad")
    assert done.returncode == 0 and load_meta(tmp_path / "b").skipped_documents == 1


def test_a_pipe_between_the_files_does_not_block(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", ROWS)
    os.mkfifo(tmp_path / "valid.jsonl")
    done = run_here("show", tmp_path)
    assert done.returncode == ExitCode.CONFIG
    assert "valid.jsonl: not a regular file" in done.stderr


def test_a_table_with_an_endless_line_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.csv.xz"
    path.write_bytes(lzma.compress(b"text,label\n" + b"a," * 2**20))
    monkeypatch.setattr("payload.data.rows.file_rows._FIELD_BYTES", 2**16)
    rows = open_rows(SourceRequest(kind="auto", inputs=(str(path),)))
    rows.identity()
    with pytest.raises(DataError, match="a line is longer than"):
        list(rows.read())


def test_the_name_of_a_file_sends_nothing_to_the_terminal(tmp_path: Path) -> None:
    for name in ("train.\x1b]0;title\x07.jsonl", "valid.\x1b[31m-00000-of-00002.jsonl"):
        write_rows(tmp_path / name, [{"text": "abc"}] * 30)
    out = tmp_path / "out"
    done = run_here("prepare", "--source", "jsonl", "--input", tmp_path, "--out", out, "--dry-run")
    assert done.returncode == 0 and "splits by file name" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_a_note_says_that_names_without_training_data_declare_nothing(tmp_path: Path) -> None:
    for names, is_noted in (
        ({"test.jsonl": 1, "valid.jsonl": 1}, True),
        ({"test/a.jsonl": 1, "test/b.jsonl": 1}, False),
    ):
        folder = splits(tmp_path / str(is_noted), names)
        source = open_rows(SourceRequest(kind="auto", inputs=(str(folder),)))
        source.identity()
        assert ("no name declares training data" in str(source.recognised())) is is_noted


@pytest.mark.parametrize(("value", "joined"), [(None, "a"), ("", "a"), ("b", "a\n\nb")])
def test_columns_with_the_same_new_name_are_joined(value: object, joined: str) -> None:
    columns = NamedColumns((("one", "user"), ("two", "user")), ())
    assert columns.convert({"one": "a", "two": value})["user"] == joined
    assert columns.convert({"two": "a", "one": value or ""})["user"] in ("a", "b\n\na")
    for other in (5, ["b"], False):
        with pytest.raises(UsageError, match="only texts can be joined"):
            columns.convert({"one": "a", "two": other})


def test_an_ignored_key_is_removed_from_parts_and_calls() -> None:
    columns = NamedColumns((), ("weight",))
    part, call = {"type": "text", "text": "b"}, {"function": {"name": "f"}}
    message = {"content": [{**part, "weight": 0}], "tool_calls": [{**call, "weight": 0}]}
    assert columns.convert({"messages": [message]}) == {
        "messages": [{"content": [part], "tool_calls": [call]}]
    }
    assert "'weight' (1 rows)" in columns.notes()[0]
