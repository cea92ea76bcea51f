"""Files of other processes with any content are rejected in one line."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from payload.core.errors import CheckpointError, ConfigError
from payload.core.printable_text import printable, shown
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import NODE_NAME, RUN_ID
from payload.core.validation.records import build


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A record in a record."""

    name: str = checked(pattern=NODE_NAME, wanted="a node name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One field of each kind."""

    step: int = checked(low=0)
    loss: float | None = None
    kind: Literal["a", "b"] = "a"
    on: bool = False
    parts: tuple[Inner, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", r"not JSON \(line 1: Expecting value"),
        (b"\xff{}", "byte 0 is not UTF-8"),
        (b"[" * 20_000, "nested too deeply"),
        (b'{"a":' * 20_000, "nested too deeply"),
        (b"1" * 4_300, "an integer of 4300 digits"),
        (b"1" * 20, "an integer of 20 digits"),
        (b"Infinity", "Infinity is not a JSON number"),
        (b"-Infinity", "-Infinity is not a JSON number"),
        (b"NaN", "NaN is not a JSON number"),
        (b"1" * 400 + b".0", "is too large"),
        (b"1e999", "the number '1e999' is too large"),
        (b'"\\ud800"', "a lone surrogate"),
        (b'{"\\udfff": 1}', "a lone surrogate"),
        (b"\x00", "not JSON"),
    ],
)
def test_json_that_would_trip_a_program_is_refused(text: bytes, problem: str) -> None:
    with pytest.raises(CheckpointError, match=rf"x\.json: .*{problem}.*\. Remove it\.$"):
        parse_json(text, where="x.json", fix="Remove it.", error=CheckpointError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A record whose writer uses other field names."""

    next_page: str = checked("", key="nextPage")


def test_a_field_may_have_another_name_in_the_json() -> None:
    assert build(Foreign, {"nextPage": "x", "next_page": "y"}, where="r") == Foreign(next_page="x")
    with pytest.raises(ConfigError, match="r: nextPage = 1: must be a string"):
        build(Foreign, {"nextPage": 1}, where="r")


def test_json_that_is_sound_is_read() -> None:
    assert parse_json('{"a": [1, -2.5, null, "\\ud83d\\ude00"]}', where="x") == {
        "a": [1, -2.5, None, "\U0001f600"]
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step": None}, "r: step = None: must be an integer"),
        ({"step": True}, "step = True: must be an integer"),
        ({"step": 1.5}, "step = 1.5: must be an integer"),
        ({"step": "1"}, "step = '1': must be an integer"),
        ({"step": -1}, "step = -1: must be at least 0"),
        ({"loss": "nan"}, "loss = 'nan': must be a finite number"),
        ({"loss": float("nan")}, "loss = nan: must be a finite number"),
        ({"loss": 10**400}, "loss = 10{40,}.*: must be a finite number"),
        ({"kind": "c"}, "kind = 'c': must be one of a, b"),
        ({"kind": ["a"]}, "kind = .*: must be one of a, b"),
        ({"on": 1}, "on = 1: must be a boolean"),
        ({"parts": {}}, "parts = {}: must be a list"),
        ({"parts": "ab"}, "parts = 'ab': must be a list"),
        ({"parts": [7]}, r"parts\[0\]: expected an object, got 7"),
        ({"parts": [{}]}, r"parts\[0\]: missing: name"),
        ({"parts": [{"name": "../a"}]}, r"parts\[0\]: name = '../a': must be a node name"),
        ({"parts": [{"name": "a\n"}]}, "must be a node name"),
        ({"parts": [{"name": "-oProxyCommand=x"}]}, "must be a node name"),
        ({"seconds": []}, r"seconds = \[\]: must be an object"),
        ({"seconds": {"a": "1"}}, r"seconds\['a'\] = '1': must be a finite number"),
    ],
)
def test_a_field_of_another_type_is_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(Record, {"step": 1, **change}, where="r")


def test_a_record_is_built_from_what_json_has() -> None:
    raw = {"step": 3, "loss": 2, "parts": [{"name": "n0"}], "seconds": {"a": 1}, "newer": 1}
    assert build(Record, raw, where="r") == Record(
        step=3, loss=2.0, parts=(Inner(name="n0"),), seconds={"a": 1.0}
    )
    with pytest.raises(ConfigError, match=r"unknown key 'newer'. Known: kind, "):
        build(Record, raw, where="r", refuse_unknown=True)


def test_an_unknown_key_near_a_known_one_is_asked_about() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'setp'. Did you mean step\? Known: kind, "):
        build(Record, {"step": 1, "setp": 1}, where="r", refuse_unknown=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """A record whose fields have error texts, and that can have fields of other classes."""

    threads: int = checked(1, choices=(1, 2))
    rate: float = checked(0.5, above=0.0, fix="Set it to 1.")
    zone: str = checked("a", pattern=NODE_NAME, refusal=" is no zone.")
    labels: tuple[str, ...] = checked((), pattern=NODE_NAME, wanted="a word", max_items=2)
    more: Limited | None = None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"threads": 3}, "r: threads = 3: must be one of 1, 2. Fix it."),
        ({"threads": True}, "r: threads = True: must be one of 1, 2. Fix it."),
        ({"rate": 0}, "r: rate = 0: must be above 0.0. Set it to 1."),
        ({"zone": "/"}, "r: zone = '/' is no zone. Fix it."),
        ({"labels": ["a", "/"]}, "r: labels[1] = '/': must be a word. Fix it."),
        (
            {"labels": ["a"] * 3},
            "r: labels = ['a', 'a', 'a']: must have at most 2 entries. Fix it.",
        ),
        (
            {"more": {"more": {"rate": 0}}},
            "r: more: more: rate = 0: must be above 0.0. Set it to 1.",
        ),
    ],
)
def test_a_field_s_own_limits_and_words_count(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Limited, raw, where="r", fix="Fix it.")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "/etc",
        "a/b",
        "a b",
        "a\n",
        "-a",
        ".a",
        "a" * 101,
        "latest",
        "a\0",
        "é",
    ],
)
def test_a_run_id_never_leads_out_of_the_runs_folder(name: str) -> None:
    assert RUN_ID.fullmatch(name) is None


@pytest.mark.parametrize("name", ["a", "quickstart-20261122T101010Z-77", "latest2", "1..2"])
def test_ordinary_run_ids_are_taken(name: str) -> None:
    assert RUN_ID.fullmatch(name)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("loss 2.5\tok\n", "loss 2.5\tok\n"),
        ("\x1b]52;c;ZXZpbA==\x07after", "after"),
        ("\x1b]0;title\x1b\\after", "after"),
        ("\x9d52;c;ZXZpbA==\x9cafter", "after"),
        ("\x1b[2J\x1b[1;31mred\x1b[0m", "red"),
        ("\x9b31mred", "red"),
        ("\x1bcreset", "reset"),
        ("a\rb\x08c\x7fd\x00e\x85f", "abcdef"),
        ("\u202eabc\u2066", "abc"),
        ("\x1b]52;c;unfinished", ""),
        ("\x1b", ""),
        ("naïve 漢字 \U0001f600", "naïve 漢字 \U0001f600"),
    ],
)
def test_escape_sequences_are_taken_out_of_text(text: str, kept: str) -> None:
    assert printable(text) == kept


def test_a_quoted_value_is_short_and_on_one_line() -> None:
    assert shown("x" * 1000).endswith("...")
    assert len(shown("x" * 1000)) == 60
    assert "\n" not in shown("a\nb")
    assert "\x1b" not in shown("\x1b[2J")
    assert shown(10**5000) == "a int"


def test_only_a_regular_file_of_bounded_size_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_bytes(file, limit_bytes=5) == b"12345"
    with pytest.raises(OSError, match="Larger than 4 bytes"):
        read_bytes(file, limit_bytes=4)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Not a regular file"):
        read_bytes(tmp_path / "pipe")
