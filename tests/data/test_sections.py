"""One text file split into documents: the cuts, completeness, and messages."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from payload.core.errors import ExitCode
from payload.data.__main__ import main
from payload.data.sources import text_sections as sections
from payload.data.sources.documents import Batch
from payload.data.sources.text_files import TextSource
from payload.data.sources.text_sections import divide
from payload.data.tokenizers.gpt2 import END_OF_TEXT, gpt2_encoding
from payload.formats.data_folder import load_meta

SPEECH = "ROMEO:\nBut, soft! what light through yonder window breaks?\n\n"


def words(count: int, *, seed: int = 1) -> str:
    choose = random.Random(seed)
    return " ".join(choose.choice(["tree", "größe", "世界", "a"]) for _ in range(count))


def write(folder: Path, text: str) -> Path:
    path = folder / "one.txt"
    path.write_bytes(text.encode())
    return path


def cut(path: Path) -> list[bytes]:
    return [section for section, _, _ in divide(path).sections(path)]


def test_a_play_in_one_file_is_prepared_as_its_speeches_and_the_command_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, SPEECH * 500)
    out = tmp_path / "out"
    command = ["prepare", "--source", "text", "--input", str(path), "--out", str(out)]
    assert main([*command, "--dry-run"]) == ExitCode.OK
    assert "is a single file: it was split into" in capsys.readouterr().out
    assert main(command) == ExitCode.OK
    said = capsys.readouterr().err
    assert f"note: {path} is a single file: it was split into" in said and "at a blank line" in said
    meta = load_meta(out)
    assert meta.train_documents + meta.val_documents >= 150
    assert meta.val_documents >= 15
    tokens = np.fromfile(out / "train.bin", dtype=np.uint16)
    for document in np.split(tokens, np.flatnonzero(tokens == END_OF_TEXT) + 1)[:-1]:
        assert gpt2_encoding().decode(document[:-1].tolist()) in SPEECH * 500


def test_a_stopped_command_resumes_in_the_middle_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, SPEECH * 200_000)
    source = TextSource([path], glob=None, skip_bad=False)
    source.identity()
    expected = source.survey().documents

    def pieces(batches: list[Batch]) -> list[tuple[int, bytes]]:
        return [pair for each in batches for pair in zip(each.numbers, each.pieces, strict=True)]

    whole = list(source.batches({}))
    assert len(whole) > 2 and len(pieces(whole)) == expected
    later = list(source.batches(json.loads(json.dumps(whole[0].cursor))))
    assert pieces(whole[:1]) + pieces(later) == pieces(whole)


@pytest.mark.parametrize(
    ("text", "cuts"),
    [
        (SPEECH * 300, "at a blank line"),
        ("\r\n".join(["line one", " \t", "line two", ""] * 3000), "at a blank line"),
        ("\n".join([words(8)] * 5000), "at a line end"),
        (words(100_000), "at a space"),
        ("世" * 200_000, "by size"),
        ("\n\n".join([words(90)] * 400) + words(50_000), "at a space"),
    ],
    ids=["speeches", "windows", "lines", "one line", "no white space", "mixed"],
)
def test_every_character_of_the_text_is_in_exactly_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cuts: str
) -> None:
    monkeypatch.setattr(sections, "_READ_BYTES", 100_003)
    path = write(tmp_path, text)
    found = cut(path)
    assert b"".join(found) == text.encode()
    assert 20 <= len(found) <= 1000
    for section in found:
        section.decode()
    assert cuts in divide(path).note


def test_form_feeds_divide_first(tmp_path: Path) -> None:
    path = write(tmp_path, "first\n\npart\fsecond\f \n\f\f third\n\n\f")
    assert cut(path) == [b"first\n\npart", b"second", b" third\n\n"]
    assert "2 at a form feed" in divide(path).note or "3 at a form feed" in divide(path).note
    lone = write(tmp_path, SPEECH * 100 + "\f")
    assert len(cut(lone)) > 20


@pytest.mark.parametrize("text", ["", " \n\n ", "one line", "\f"])
def test_a_file_with_nothing_to_divide_is_refused_as_too_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    command = ["prepare", "--source", "text", "--input", str(write(tmp_path, text))]
    assert main([*command, "--out", str(tmp_path / "out")]) == ExitCode.CONFIG
    assert "1 document; training and validation need at least 2" in capsys.readouterr().err


def test_a_byte_that_is_not_utf8_is_named_by_its_line_and_its_section_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(SPEECH.encode() * 100 + b"bad \xff byte\n\n" + SPEECH.encode() * 100)
    command = ["prepare", "--source", "text", "--input", str(path), "--out", str(tmp_path / "out")]
    assert main(command) == ExitCode.CONFIG
    assert f"{path} line 301: byte {len(SPEECH) * 100 + 4} (0xff)" in capsys.readouterr().err
    assert main([*command, "--skip-bad"]) == ExitCode.OK
    assert load_meta(tmp_path / "out").skipped_documents == 1


def test_several_files_stay_one_document_each(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(SPEECH * 100)
    source = TextSource([tmp_path], glob=None, skip_bad=False)
    source.identity()
    assert source.survey().documents == 2
