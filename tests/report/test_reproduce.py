"""The page's commands that prepare the data again."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import DataError
from payload.core.suggested_commands import quoted
from payload.data.__main__ import main, parser
from payload.data.sources.text_files import describe_inputs
from payload.formats.data_folder import META_NAME, ChatRecord, DataMeta, load_meta
from payload.report.markup import text
from payload.report.reproduce import prepare_lines
from tests.support.data_folders import make_data_folder

CHAT = ChatRecord(
    sequence_length=64,
    packing="none",
    template_sha256="0" * 64,
    train_trained_tokens=1,
    val_trained_tokens=1,
    train_padding_tokens=0,
    val_padding_tokens=0,
    truncated_conversations=0,
    truncated_tokens=0,
    dropped_conversations=0,
)


def test_data_in_a_bucket_is_not_prepared_again(meta: DataMeta) -> None:
    (line,) = prepare_lines(meta, out="gs://bucket/data")
    assert line.startswith("#") and "gs://bucket/data" in line


@pytest.fixture
def meta(tmp_path: Path) -> DataMeta:
    return load_meta(make_data_folder(tmp_path / "data"))


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"source": "stdlib: Python 3.11.2"}, "--source stdlib"),
        (
            {"source": "openwebtext: Skylion007/openwebtext, split train", "revision": "79d9"},
            "--source openwebtext",
        ),
        (
            {"source": "openwebtext: my/copy, split train"},
            "--source openwebtext --input my/copy",
        ),
        (
            {"source": "hf: roneneldan/TinyStories, split train", "revision": "f54c"},
            "--source hf --input roneneldan/TinyStories --revision f54c",
        ),
        ({"source": "hf: my/set, split test"}, "--source hf --input my/set --split test"),
        ({"source": "hf: folder ./a/b, split train"}, "--source hf --input ./a/b"),
        ({"source": "jsonl: my texts.jsonl"}, "--source jsonl --input 'my texts.jsonl'"),
        (
            {"source": "jsonl: a.jsonl", "task": "chat", "chat": CHAT, "tokenizer": "a/b@c0ffee"},
            "--source jsonl --input a.jsonl --task chat --sequence-length 64 --packing none",
        ),
        (
            {"source": "csv: a.csv", "task": "classify"},
            "--source csv --input a.csv --task classify",
        ),
    ],
)
def test_data_is_prepared_again_with_its_source_task_and_tokenizer(
    fields: dict[str, Any], options: str, meta: DataMeta
) -> None:
    meta = replace(meta, **fields)
    line, *notes = prepare_lines(meta, out="data/mine")
    assert line.endswith(f"prepare {options} --tokenizer {meta.tokenizer} --out data/mine")
    typed = shlex.split(line)
    assert parser().parse_args(typed[typed.index("prepare") :]).out == Path("data/mine")
    assert all(
        note.startswith("# If this data folder was made with other options") for note in notes
    )


@pytest.mark.parametrize(
    "source",
    [
        "jsonl: a.jsonl, b.jsonl",
        "text: a, b, c and 4 more",
        "random phrases",
        "jsonl: ",
        "hf: my/set",
        "jsonl: a, b\nrm -r /",
    ],
)
def test_a_source_without_all_inputs_gives_a_comment(source: str, meta: DataMeta) -> None:
    lines = prepare_lines(replace(meta, source=source), out="data/mine")
    assert len(lines) == 1 and "\n" not in lines[0]
    assert lines[0].startswith("# Repeat the command that made data/mine of ")


def test_the_command_makes_the_same_data_again(tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "one two"}\n{"text": "three four"}\n{"text": "five"}\n' * 9)
    first, second = tmp_path / "first", tmp_path / "second"
    options = ["--source", "jsonl", "--input", str(text), "--quiet"]
    assert main(["prepare", *options, "--out", str(first)]) == 0
    typed = shlex.split(prepare_lines(load_meta(first), out=str(second))[0])
    assert main([*typed[typed.index("prepare") :], "--quiet"]) == 0
    assert load_meta(second) == load_meta(first)


ESCAPES = (
    "a\x1b]' ; touch PWNED; '\x07b",
    "a'\x9bm' $(touch PWNED) '",
    "\x1b]a\x07'; touch PWNED #",
)
"""Removing the escape sequence from a quoted argument would remove a quote, too."""


@pytest.mark.parametrize("name", ESCAPES)
def test_a_control_character_does_not_take_a_quote_with_it(name: str, meta: DataMeta) -> None:
    """The page removes control characters, which must happen before quoting."""
    line, _ = prepare_lines(
        replace(meta, source=f"jsonl: {name}", tokenizer=name), out=f"data/{name}"
    )
    shown = unescape(text(line))
    typed = shlex.split(shown)
    assert typed == shlex.split(line)
    assert len(typed[typed.index("prepare") :]) == 9
    assert shlex.split(f"cd {unescape(text(quoted(name)))}")[2:] == []


def test_a_comment_on_the_page_has_one_line(meta: DataMeta) -> None:
    lines = prepare_lines(meta, out="gs://bucket/data\ntouch PWNED")
    assert [line.count("\n") for line in lines] == [0]


@pytest.mark.parametrize("name", [*ESCAPES, "a\nb"])
def test_a_source_with_control_characters_is_refused_and_never_written(
    name: str, tmp_path: Path
) -> None:
    folder = make_data_folder(tmp_path / "data")
    path = folder / META_NAME
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"source": describe_inputs("jsonl", [Path(name)])}))
    load_meta(folder)
    path.write_text(json.dumps(raw | {"source": f"jsonl: {name}"}))
    with pytest.raises(DataError, match="one line without control characters"):
        load_meta(folder)
