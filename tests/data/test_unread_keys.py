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
from payload.data.rows.conversations import (
    BadConversationError,
    UntrainedRowError,
    columns_of,
    conversation_of,
    unread_columns,
)
from payload.data.rows.open_rows import open_rows
from payload.data.rows.preferences import preference_of
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
    "more",
    [
        {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]},
        {"reasoning_content": "I count."},
        {"images": ["duck.jpg"]},
        {"trainable_at": 0},
        {"weight_index": 0},
        {"no_train_id": 1},
        {"is_masked_id": 1},
    ],
)
def test_a_key_of_a_message_reaches_the_template_unless_it_is_metadata(
    more: Mapping[str, Any],
) -> None:
    answer = {"role": "assistant", "content": "b", **more}
    assert conversation_of(chat(**more, id=7)).messages[1] == answer
    pair = preference_of({"prompt": "a", "chosen": [{**answer, "id": 7}], "rejected": "d"})
    assert pair.chosen == [answer]


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"weight": 0}, UntrainedRowError),
        ({"weight": 0.0}, UntrainedRowError),
        ({"weight": "0"}, UntrainedRowError),
        ({"weight": Decimal(0)}, UntrainedRowError),
        ({"train": False}, UntrainedRowError),
        ({"train": "False"}, UntrainedRowError),
        ({"weight": -1}, BadConversationError),
        ({"weight": 0.5}, BadConversationError),
        ({"weight": float("nan")}, BadConversationError),
    ],
)
def test_a_row_that_says_that_it_is_not_trained_is_left_out(
    more: dict[str, Any], kind: type[Exception]
) -> None:
    for read, row in (
        (conversation_of, {"messages": turn("a", "b")}),
        (preference_of, {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ):
        with pytest.raises(BadConversationError) as caught:
            read({**row, **more})
        assert type(caught.value) is kind


def test_an_answer_to_avoid_is_not_trained_as_a_good_one() -> None:
    row = {"prompt": "a", "completion": "b"}
    others = ({"messages": turn("a", "b")}, {"instruction": "a", "output": "b"})
    for each in (row, *others):
        for bad in (False, "False"):
            with pytest.raises(UntrainedRowError, match="marks a bad answer"):
                conversation_of({**each, "label": bad})
        for unclear in (0, "0", -1.0):
            with pytest.raises(BadConversationError, match="may mark a bad answer"):
                conversation_of({**each, "label": unclear})
    for label in (2, "no"):
        labelled: dict[str, Any] = {**row, "label": label}
        assert unread_columns(labelled, columns_of(labelled)) == ["label"]
    for good in ("True", "1", True, None):
        labelled = {**row, "label": good, "weight": 1}
        assert list(conversation_of(labelled).messages) == turn("a", "b")
        assert unread_columns(labelled, columns_of(labelled)) == []


def test_a_question_cannot_be_trained() -> None:
    row = {"conversations": [{"from": "human", "value": "a", "weight": 1}]}
    problem = r"conversations\[0\]: weight = 1 is not supported: .* role 'user' is not trained"
    with pytest.raises(BadConversationError, match=problem):
        conversation_of(row)


@pytest.mark.parametrize(
    "row",
    [
        # As parquet returns absent keys, and as in OpenAI's answers.
        chat(weight=None, tool_calls=None, refusal=None, annotations=[], reasoning_content=""),
        chat(weight=1, train=True, id="m7", parent_id=6, created_at=1.5, model="m"),
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
    assert unread_columns({**row, "system": "be brief"}, columns_of(row)) == []


def test_a_system_column_goes_first_in_a_pair() -> None:
    row = {"system": "be brief", "prompt": "a", "chosen": "b", "rejected": "c"}
    assert [each["role"] for each in preference_of(row).prompt] == ["system", "user"]


@pytest.mark.processes  # a process renders a template
@pytest.mark.parametrize("task", ["chat", "preference"])
def test_columns_that_are_not_read_are_named_once(task: str, tmp_path: Path) -> None:
    rows = [{"messages": each} for each in conversations(9)] if task == "chat" else pairs(9)
    rows = [{**row, "source": "x", "empty": "", "group": n % 3} for n, row in enumerate(rows)]
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
    assert done.stderr.count("note: ignored columns: 'source' (9 rows)\n") == 1


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


LIST = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
ANSWER = [{"role": "assistant", "content": "c"}]


@pytest.mark.parametrize("names", [("prompt", "completion"), ("question", "answer")])
def test_json_text_of_messages_is_read_as_messages(names: tuple[str, str]) -> None:
    question, answer = names
    row = {question: json.dumps(LIST), answer: json.dumps(ANSWER)}
    assert list(conversation_of(row).messages) == [*LIST, *ANSWER]
    sharegpt = [{"from": "human", "value": "b"}]
    assert conversation_of({**row, question: json.dumps(sharegpt)}).messages[0] == LIST[1]


@pytest.mark.parametrize(
    "text",
    ["[]", "[1, 2]", '["a"]', '[{"role": "user"}]', '[{"role": "user", "content": "a"}, 3]', "{}",
     '{"role": "user", "content": "a"}', "[not JSON", '[{"name": "a", "content": "b"}]'],
)  # fmt: skip
def test_other_json_text_stays_text(text: str) -> None:
    messages = conversation_of({"prompt": "a", "completion": text}).messages
    assert messages[1] == {"role": "assistant", "content": text}
    pair = preference_of({"prompt": "a", "chosen": text, "rejected": "b"})
    assert pair.chosen == [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("has_prompt", [True, False])
def test_json_text_of_pairs_is_read_as_messages(has_prompt: bool) -> None:
    other = [{"role": "assistant", "content": "d"}]
    row: dict[str, Any] = {"chosen": ANSWER, "rejected": other}
    if has_prompt:
        row["prompt"] = LIST
    else:
        row = {key: [*LIST, *each] for key, each in row.items()}
    pair = preference_of({key: json.dumps(each) for key, each in row.items()})
    assert (pair.prompt, pair.chosen, pair.rejected) == (LIST, ANSWER, other)
    answers = {"preferred_output": ANSWER, "non_preferred_output": other}
    openai = {"input": {"messages": LIST}, **answers}
    assert preference_of({key: json.dumps(each) for key, each in openai.items()}) == pair
