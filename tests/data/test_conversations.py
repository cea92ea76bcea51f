"""Common behaviour and common errors of `prepare --task chat` and `--task preference`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.core.errors import ConfigError, DataError, ExitCode
from payload.core.tasks import TaskKind
from payload.data.__main__ import main
from payload.data.reading.packed_blocks import PackedBlocks, open_packed
from payload.data.reading.pairs import Pairs, open_pairs
from payload.formats.data_folder import load_meta
from payload.orchestrate.runs.run_input_checks import check_data
from tests.support.chat_data import (
    MARKED_TEMPLATE,
    PLAIN_TEMPLATE,
    conversations,
    make_tokenizer,
    prepare,
    prepare_words,
    write_rows,
)
from tests.support.preference_data import pairs

pytestmark = pytest.mark.processes  # a process renders the template


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of conversations, with rows of a source."""

    name: TaskKind
    rows: list[dict[str, Any]]
    length: int
    samples: str
    """Name of its samples in the output of `show`."""
    other: TaskKind
    """A task that cannot use its data."""
    wrong_length: str
    """Error for data that is read with another length."""

    def opened(self, folder: Path) -> PackedBlocks | Pairs:
        """Open the training data."""
        opens = open_packed if self.name == "chat" else open_pairs
        return opens(folder, split="train", sequence_length=self.length)


CHAT = Task(
    name="chat",
    rows=[{"messages": each} for each in conversations(60, turns=2)],
    length=128,
    samples="conversations",
    other="text",
    wrong_length="was packed into blocks of 128",
)
PREFERENCE = Task(
    name="preference",
    rows=pairs(40),
    length=64,
    samples="pairs",
    other="chat",
    wrong_length="was prepared for conversations of 64",
)
TASKS = {"chat": CHAT, "preference": PREFERENCE}


def task_name(value: object) -> str | None:
    """Return the name of a task for a test's id."""
    return value.name if isinstance(value, Task) else None


each_task = pytest.mark.parametrize("task", TASKS.values(), ids=task_name)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folders(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A data folder of each task; its source is `in.jsonl` next to it."""
    made = {}
    for name, task in TASKS.items():
        place = tmp_path_factory.mktemp(name)
        source = write_rows(place / "in.jsonl", task.rows)
        flags = ("--sequence-length", task.length, "--val-fraction", 0.2)
        made[name] = prepare(tokenizer, source, place / "data", *flags, task=name)
    return made


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


@each_task
def test_a_dry_run_shows_the_size_and_writes_nothing(
    task: Task,
    tokenizer: Path,
    folders: Mapping[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = folders[task.name].with_name("in.jsonl")
    flags = ("--sequence-length", task.length, "--val-fraction", 0.2, "--dry-run", "--json")
    words = prepare_words(tokenizer, source, tmp_path / "out", *flags, task=task.name)
    assert main(words) == ExitCode.OK
    found, meta = json.loads(capsys.readouterr().out), load_meta(folders[task.name])
    assert found["documents"] == len(task.rows)
    assert found["tokens"] == meta.train_tokens + meta.val_tokens
    folder_bytes = sum(file.bytes for file in meta.files.values())
    if task.name == "chat":
        # Until the end, the tokens of all conversations are beside the folder's files, in four
        # bytes a token.
        assert found["need_bytes"] > folder_bytes + 4 * found["tokens"] / 2
    else:
        assert found["need_bytes"] == folder_bytes
    assert not (tmp_path / "out").exists()


@each_task
def test_a_plan_refuses_data_of_another_task_or_length(
    task: Task, folders: Mapping[str, Path]
) -> None:
    folder = folders[task.name]
    vocab_size = check_data(folder, sequence_length=task.length, task=task.name).vocab_size
    assert vocab_size == load_meta(folder).vocab_size == 300
    problem = rf"task\.kind = '{task.other}', but .* with --task {task.name}"
    with pytest.raises(ConfigError, match=problem):
        check_data(folder, sequence_length=task.length, task=task.other)
    with pytest.raises(ConfigError, match=task.wrong_length):
        check_data(folder, sequence_length=task.length // 2, task=task.name)


@each_task
def test_show_refuses_a_sample_that_is_not_there(
    task: Task, folders: Mapping[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    count = load_meta(folders[task.name]).train_documents
    assert count == 0.8 * len(task.rows)
    assert main(["show", str(folders[task.name]), "--sample", str(count)]) == ExitCode.CONFIG
    said = f"has {count} {task.samples} in train. Use 0 to {count - 1}."
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "name", "place"),
    [
        (CHAT, "train.marks.bin", 5),
        *((PREFERENCE, f"train.{name}bin", 0) for name in ("marks.", "", "pairs.")),
    ],
    ids=task_name,
)
def test_damage_is_found_when_it_is_read(
    task: Task, folders: Mapping[str, Path], tmp_path: Path, name: str, place: int
) -> None:
    copy = shutil.copytree(folders[task.name], tmp_path / "copy")
    damaged = bytearray((copy / name).read_bytes())
    damaged[place] ^= 1
    (copy / name).write_bytes(damaged)
    escaped = name.replace(".", r"\.")
    problem = (
        rf"{escaped}: the hash of bytes 0 to .* differs .* The file is damaged"
        if task is CHAT
        else escaped
    )
    with pytest.raises(DataError, match=problem):
        task.opened(copy).gather(np.arange(1, dtype=np.int64))


@pytest.mark.parametrize(
    ("task", "change", "problem"),
    [
        (CHAT, {"chat": None}, r"meta\.json"),
        (CHAT, {"task": "text"}, r"meta\.json"),
        (CHAT, {"task": "poem"}, r"meta\.json"),
        (CHAT, {"chat": {"sequence_length": 1}}, r"meta\.json"),
        (CHAT, {"files": {}}, r"meta\.json"),
        (CHAT, {"train_tokens": 7}, r"meta\.json"),
        (PREFERENCE, {"preference": None}, "preference contradict each other"),
        (PREFERENCE, {"task": "chat"}, "files must be"),
    ],
    ids=task_name,
)
def test_a_meta_json_that_contradicts_itself_is_refused(
    task: Task, folders: Mapping[str, Path], tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    copy = shutil.copytree(folders[task.name], tmp_path / "copy")
    raw = json.loads((copy / "meta.json").read_text(encoding="utf-8"))
    (copy / "meta.json").write_text(json.dumps(raw | change), encoding="utf-8")
    with pytest.raises(DataError, match=problem):
        load_meta(copy)


ANSWER = {"role": "assistant", "content": "red"}
ASK = {"role": "user", "content": "add"}
BAD_CONVERSATIONS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": "a"}]}, "no message has role 'assistant'"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0]: unknown role 'robot'"),
    ({"messages": []}, "messages is an empty list"),
    ({"messages": "hello"}, "messages is 'hello', not a list of messages"),
    ({"messages": [{"role": "user"}]}, "A message needs the keys 'role' and 'content'"),
    ({"messages": [{"role": "user", "content": 7}]}, "content is 7, not text"),
    ({"conversations": [{"from": "pope", "value": "a"}]}, "unknown role 'pope'"),
    ({"prompt": "a", "completion": 7}, "completion is 7, not text and not a list"),
    ({"instruction": None, "output": "a"}, "instruction is None, not text"),
    ({"text": "a"}, "no conversation in the columns 'text'. Formats: messages"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "the template"),
]
BAD_PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "rejected": "b"}, "no chosen in the columns 'prompt', 'rejected'. Formats:"),
    ({"prompt": "a", "chosen": "b"}, "no rejected in the columns"),
    ({"prompt": "a", "chosen": None, "rejected": "b"}, "no chosen in the columns"),
    ({"question": "a", "good": "b"}, "no chosen and no rejected in the columns 'question'"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
    ({"chosen": "b", "rejected": "c"}, "no prompt for the plain text in chosen and rejected"),
    ({"prompt": 7, "chosen": "b", "rejected": "c"}, "prompt is 7, not text and not a list"),
    ({"prompt": "a", "chosen": [], "rejected": "c"}, "chosen is [], not text and not a list"),
    (
        {"chosen": [ASK, ANSWER], "rejected": [{**ASK, "content": "b"}, ANSWER]},
        "do not begin with the same message",
    ),
    (
        {"chosen": [ASK, ANSWER], "rejected": [ASK]},
        "rejected has nothing after the prompt. Add the assistant's answer",
    ),
    (
        {"chosen": [ASK, ANSWER], "rejected": [ASK, ASK]},
        "rejected has a message of role 'user' after the prompt",
    ),
    (
        {"prompt": "a", "chosen": [ASK, ANSWER], "rejected": "c"},
        "chosen begins with a message of role 'user', which is not in the prompt",
    ),
    (
        {"prompt": "a", "chosen": [{"role": "robot", "content": "b"}], "rejected": "c"},
        "chosen[0]: unknown role 'robot'",
    ),
    (
        {"prompt": "add " * 200, "chosen": "b", "rejected": "c"},
        "which leaves no room for the answer in --sequence-length 64",
    ),
    (
        {"prompt": "a", "chosen": "red " * 80 + "a", "rejected": "red " * 80 + "b"},
        "chosen and rejected have the same first 64 tokens",
    ),
]


@pytest.fixture(scope="module")
def strict_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template rejects a conversation that does not begin with the user."""
    strict = PLAIN_TEMPLATE.replace(
        "{% for",
        "{% if messages[0]['role'] == 'assistant' or not messages %}"
        "{{ raise_exception('the template wants a user first') }}{% endif %}{% for",
        1,
    )
    return make_tokenizer(tmp_path_factory.mktemp("strict"), template=strict)


@pytest.mark.parametrize(
    ("task", "row", "complaint"),
    [
        *((CHAT, *each) for each in BAD_CONVERSATIONS),
        *((PREFERENCE, *each) for each in BAD_PAIRS),
    ],
    ids=task_name,
)
def test_a_bad_row_is_one_line_or_a_counted_skip(
    task: Task,
    strict_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row: dict[str, Any],
    complaint: str,
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [*task.rows[:4], row, *task.rows[4:]])
    flags = ("--sequence-length", task.length)
    words = prepare_words(strict_tokenizer, source, tmp_path / "out", *flags, task=task.name)
    assert main(words) == ExitCode.CONFIG
    line = error_line(capsys)
    assert line.startswith(f"error: {source} line 5: ") and complaint in line
    assert "or skip such rows with --skip-bad." in line
    assert not (tmp_path / "out").exists()
    assert main([*words, "--skip-bad"]) == ExitCode.OK
    meta = load_meta(tmp_path / "out")
    assert meta.skipped_documents == 1
    assert "line 5" in meta.skipped_examples[0] and complaint in meta.skipped_examples[0]


REWRITING = PLAIN_TEMPLATE.replace(
    "message['content']", "(message['content'] if loop.last else 'x')"
)
"""It omits earlier answers when later messages follow."""
EMPTY_ANSWERS = MARKED_TEMPLATE.replace("message['content'] + '<|im_end|>'", "'' + ''", 1)
OTHERS_MARKED = MARKED_TEMPLATE.replace("== 'assistant'", "== 'user'", 1)
"""The blocks are around the user's turns."""
NO_MARKS = (
    "{% for m in messages %}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("task", "template", "complaint"),
    [
        (CHAT, REWRITING, "message 1 of 4: the template leaves out the text"),
        (CHAT, EMPTY_ANSWERS, "message 2 of 4: the message is in no {% generation %} block"),
        (CHAT, OTHERS_MARKED, "message 2 of 4: no stop token follows"),
        (PREFERENCE, NO_MARKS, "no stop token follows the assistant's turns"),
        *((task, None, "the model has no chat template") for task in TASKS.values()),
        (CHAT, "{% for x in %}", "is not a valid template"),
        (PREFERENCE, "{{ messages", "is not a valid template"),
    ],
    ids=task_name,
)
def test_a_template_that_cannot_be_used_is_one_line(
    task: Task,
    folders: Mapping[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    template: str | None,
    complaint: str,
) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template=template)
    source = folders[task.name].with_name("in.jsonl")
    out = tmp_path / "out"
    assert main(prepare_words(tokenizer, source, out, task=task.name)) == ExitCode.CONFIG
    assert complaint in error_line(capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    ("task", "text", "complaint"),
    [
        (CHAT, 'prompt,completion\n"a,b\nc,d\n', "line 2: not CSV in UTF-8"),
        (
            CHAT,
            "prompt,completion\na,b\nc\n",
            "line 3: 1 fields, but 2 columns (prompt, completion)",
        ),
        (
            CHAT,
            "prompt,completion\na,b\n",
            "the source has 1 document; training and validation need at least 2",
        ),
        (PREFERENCE, 'prompt,chosen,rejected\n"a,b,c\n', "line 2: not CSV in UTF-8"),
        (
            PREFERENCE,
            "prompt,chosen,rejected\na,b,c\na,b\n",
            "line 3: 2 fields, but 3 columns (prompt, chosen, rejected)",
        ),
        (
            PREFERENCE,
            "prompt,chosen\na,b\n",
            "line 2: no rejected in the columns 'prompt', 'chosen'",
        ),
        (
            PREFERENCE,
            "prompt,chosen,rejected\na,b,c\n",
            "the source has 1 document; training and val",
        ),
    ],
    ids=task_name,
)
def test_a_source_that_cannot_be_used_is_one_line(
    task: Task,
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    complaint: str,
) -> None:
    source = tmp_path / "in.csv"
    source.write_text(text, encoding="utf-8")
    out = tmp_path / "out"
    assert main(prepare_words(tokenizer, source, out, task=task.name)) == ExitCode.CONFIG
    assert complaint in error_line(capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    ("task", "flags", "code", "complaint"),
    [
        ("text", ["--packing", "none"], 2, "--packing is only for --task chat, not text"),
        ("preference", ["--packing", "none"], 2, "--packing is only for --task chat, not prefer"),
        ("chat", ["--text-column", "x"], 2, "--text-column is not used by --task chat"),
        ("preference", ["--text-column", "prompt"], 2, "is not used by --task preference"),
        ("preference", ["--label-column", "x"], 2, "--label-column is only for --task classify"),
        ("chat", ["--chat-template", "none.jinja"], 10, "cannot be read"),
        ("chat", ["--tokenizer", "gpt2"], 10, "GPT-2 has no chat template"),
    ],
)
def test_a_flag_that_does_not_suit_is_one_line(
    task: str,
    flags: list[str],
    code: int,
    complaint: str,
    folders: Mapping[str, Path],
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = folders["preference" if task == "preference" else "chat"].with_name("in.jsonl")
    out = tmp_path / "out"
    words = prepare_words(tokenizer, source, out, *flags, task=task)
    if task == "text":
        place = words.index("--tokenizer")
        del words[place : place + 2]
    assert main(words) == code
    assert complaint in error_line(capsys)
    assert not out.exists()
