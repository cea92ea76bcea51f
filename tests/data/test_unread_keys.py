"""A key or column that is not read is an error, or is listed in a note."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import ExitCode
from payload.data.__main__ import main as data
from payload.data.rows.conversations import BadConversationError, conversation_of, unread_columns
from payload.data.rows.preferences import preference_of
from payload.data.rows.rows import open_rows
from payload.data.sources.source_flags import SourceRequest
from payload.data.sources.text_files import missing_shards
from tests.data.running import run_here
from tests.support.chat_data import conversations, make_tokenizer, prepare_words, turn, write_rows
from tests.support.preference_data import pairs


def chat(**more: object) -> dict[str, Any]:
    """Return a row whose answer has additional keys."""
    asked, answer = turn("a", "b")
    return {"messages": [asked, {**answer, **more}]}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (
            {"weight": 0},
            r"messages\[1\]: weight = 0 is not supported: .* role 'assistant' is trained",
        ),
        ({"weight": 0.5}, r"weight = 0\.5"),
        ({"train": False}, r"train = False"),
        ({"weight": "0"}, r"the key 'weight' \('0'\) is not supported"),
        (
            {"tool_calls": [{"id": "a"}], "content": ""},
            r"\[1\]: the key 'tool_calls' .* is not supported",
        ),
        ({"reasoning_content": "I count."}, r"'reasoning_content' \('I count\.'\)"),
        ({"function_call": {"name": "add"}}, "'function_call'"),
        ({"images": ["duck.jpg"]}, "'images'"),
        ({"trainable_at": 0}, "'trainable_at'"),
        ({"weight_index": 0}, "'weight_index'"),
        ({"no_train_id": 1}, "'no_train_id'"),
        ({"is_masked_id": 1}, "'is_masked_id'"),
    ],
)
def test_a_key_of_a_message_that_is_not_read_is_refused(
    more: Mapping[str, Any], problem: str
) -> None:
    with pytest.raises(BadConversationError, match=problem):
        conversation_of(chat(**more))
    answer = {"role": "assistant", "content": "c", **more}
    with pytest.raises(BadConversationError, match=r"chosen\[0\]: "):
        preference_of({"prompt": "a", "chosen": [answer], "rejected": "d"})


@pytest.mark.parametrize(
    "more",
    [
        {"weight": 0},
        {"weight": 0.0},
        {"weight": -1},
        {"weight": float("nan")},
        {"weight": "0"},
        {"weight": Decimal(0)},
        {"train": False},
        {"train": "False"},
    ],
)
def test_a_row_that_says_that_it_is_not_trained_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(
        BadConversationError, match="excludes the row from training, which is not supported"
    ):
        conversation_of({"messages": turn("a", "b"), **more})
    with pytest.raises(
        BadConversationError, match="excludes the row from training, which is not supported"
    ):
        preference_of({"prompt": "a", "chosen": "b", "rejected": "c", **more})


def test_an_answer_to_avoid_is_not_trained_as_a_good_one() -> None:
    row = {"prompt": "a", "completion": "b"}
    others = ({"messages": turn("a", "b")}, {"instruction": "a", "output": "b"})
    for bad in (False, 0, "False", "0", -1.0):
        for each in (row, *others):
            with pytest.raises(BadConversationError, match="marks a bad answer"):
                conversation_of({**each, "label": bad})
    for fine in ("True", "1", 2, "no", "", None):
        assert list(conversation_of({**row, "label": fine, "weight": "0.5"}).messages) == turn(
            "a", "b"
        )
    assert list(conversation_of({**row, "label": True, "weight": 1}).messages) == turn("a", "b")


def test_a_key_of_sharegpt_that_is_not_read_is_refused() -> None:
    row = {"conversations": [{"from": "human", "value": "a", "weight": 1}]}
    problem = r"conversations\[0\]: weight = 1 is not supported: .* role 'user' is not trained"
    with pytest.raises(BadConversationError, match=problem):
        conversation_of(row)


@pytest.mark.parametrize(
    "row",
    [
        # As parquet returns absent keys, and as in OpenAI's answers.
        chat(weight=None, tool_calls=None, refusal=None, annotations=[], reasoning_content=""),
        chat(weight=1, train=True, name="Ada", id="m7", parent_id=6, created_at=1.5, model="m"),
        # As in SlimOrca: the same weights that every trainer assumes.
        {
            "conversations": [
                {"from": "human", "value": "a", "weight": 0.0},
                {"from": "gpt", "value": "b", "weight": 1.0},
            ]
        },
    ],
    ids=["absent", "about the message", "usual weights"],
)
def test_a_key_that_changes_nothing_passes(row: dict[str, Any]) -> None:
    assert list(conversation_of(row).messages) == turn("a", "b")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": "b"},
        {"prompt": [{"role": "user", "content": "a"}], "completion": "b"},
        {"messages": turn("a", "b")},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"instruction": "a", "output": "b"},
    ],
)
def test_a_system_column_goes_first_in_every_format(row: dict[str, Any]) -> None:
    system = {"role": "system", "content": "be brief"}
    assert list(conversation_of({**row, "system": "be brief"}).messages) == [
        system,
        *turn("a", "b"),
    ]
    assert list(conversation_of({**row, "system": None}).messages) == turn("a", "b")
    assert unread_columns({**row, "system": "be brief"}, list(row)) == []


def test_a_system_column_goes_first_in_a_pair() -> None:
    row = {"system": "be brief", "prompt": "a", "chosen": "b", "rejected": "c"}
    assert [each["role"] for each in preference_of(row).prompt] == ["system", "user"]


@pytest.mark.processes  # a process renders a template
@pytest.mark.parametrize("task", ["chat", "preference"])
def test_columns_that_are_not_read_are_named_once(task: str, tmp_path: Path) -> None:
    rows = [{"messages": each} for each in conversations(9)] if task == "chat" else pairs(9)
    rows = [{**row, "tools": "[]", "empty": "", "group": n % 3} for n, row in enumerate(rows)]
    words = prepare_words(
        make_tokenizer(tmp_path / "model"),
        write_rows(tmp_path / "in.jsonl", rows),
        tmp_path / "out",
        *("--sequence-length", 64, "--group-column", "group"),
        task=task,
    )
    words.remove("--quiet")
    done = run_here(*words)
    assert done.returncode == ExitCode.OK
    assert done.stderr.count("note: ignored columns: 'tools' (9 rows)\n") == 1


@pytest.mark.parametrize("task", ["text", "classify"])
def test_a_key_twice_in_a_json_row_is_refused(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 1, "text": "c"}\n')
    words = ["prepare", "--task", task, "--source", "jsonl", "--input", str(path), "--quiet"]
    assert data([*words, "--out", str(tmp_path / "out")]) == ExitCode.CONFIG
    assert "line 2: not JSON: the key 'text' is repeated." in capsys.readouterr().err


def test_copies_and_unfinished_files_of_a_folder_are_left_out(tmp_path: Path) -> None:
    names = ["a.jsonl", "b.jsonl.gz", "a.jsonl.bak", "a.jsonl~", "c.jsonl.part", "d.jsonl.zst"]
    for name in names:
        (tmp_path / name).write_text(json.dumps({"text": name}))

    def found(glob: str | None = None, given: Path = tmp_path) -> list[str]:
        request = SourceRequest(kind="jsonl", inputs=(str(given),), glob=glob)
        return [Path(each[0]).name for each in open_rows(request).identity()]

    # An unreadable file is an error; only files with backup suffixes are skipped.
    assert found() == ["a.jsonl", "b.jsonl.gz", "d.jsonl.zst"]
    assert found(glob="*.bak") == found(given=tmp_path / "a.jsonl.bak") == ["a.jsonl.bak"]


@pytest.mark.parametrize("source", ["text", "jsonl", "hf"])
def test_absent_shards_are_named(source: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in (0, 2):
        path = tmp_path / "in" / f"train-0000{number}-of-00003.jsonl"
        path.write_text("".join(f'{{"text": "text {n}"}}\n' for n in range(20)))
    words = ("prepare", "--source", source, "--input", tmp_path / "in", "--out", tmp_path / "out")
    done = run_here(*words, "--dry-run", "--json")
    note = f"files are missing: {tmp_path}/in/train-*-of-00003.jsonl: 2 of 3 files"
    assert json.loads(done.stdout)["note"] == note
    assert missing_shards([f"a-{n}-of-2.jsonl" for n in range(2)] + ["b.jsonl"]) is None
