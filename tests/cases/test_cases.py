"""Each input is trained as its format and its template say, through the commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.data.__main__ import main as data
from payload.finetune.__main__ import main as finetune
from payload.formats.data_folder import load_meta
from tests.chat_templates.sources import trl_templates
from tests.support.chat_data import make_model, prepare_words

pytestmark = pytest.mark.processes

FILES = Path(__file__).parent / "files"
_START, _USER, _ANSWER = "<|im_start|>", "<|im_start|>user\n", "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "chatml")


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a template that has tools and thoughts."""
    path = tmp_path_factory.mktemp("template") / "qwen3.jinja"
    path.write_text(trl_templates()["trl/qwen3"], encoding="utf-8")
    return path


def prepared(model: Path, out: Path, name: str, *flags: object, task: str = "chat") -> int:
    """Prepare an input, whose format the content decides, and return the exit code."""
    words = prepare_words(model, FILES / name, out, "--sequence-length", 1024, *flags, task=task)
    words[words.index("--source") + 1] = "jsonl"
    return data(words)


def sample(out: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return a training sample, with its trained text between ⟦ and ⟧."""
    capsys.readouterr()
    assert data(["show", str(out), "--sample", "1", *flags]) == ExitCode.OK
    return capsys.readouterr().out


TEMPLATES = [
    # A token that crosses the start of a block is trained.
    (
        "generation_space.jinja",
        "one_turn",
        r"USER: Is \d+ even\? ASSISTANT:⟦ (Yes|No)<\|im_end\|>⟧",
    ),
    (
        "conditional_stop.jinja",
        "two_turns",
        r"user\nIs \d+ even\?<\|im_end\|>\n<\|im_start\|>assistant\n⟦(Yes|No)\.<\|im_end\|>⟧"
        r"\n<\|im_start\|>user\nSure\?<\|im_end\|>\n<\|im_start\|>assistant\n"
        r"⟦Quite sure\.<\|im_end\|>⟧",
    ),
    (
        "stop_before_next_turn.jinja",
        "two_turns",
        r"assistant\n⟦(Yes|No)\.<\|im_end\|>⟧\n<\|im_start\|>user\nSure\?<\|im_end\|>\n"
        r"<\|im_start\|>assistant\n⟦Quite sure\.<\|im_end\|>⟧",
    ),
    (
        "next_role_stop.jinja",
        "two_turns",
        r"<\|assistant\|>\n⟦(Yes|No)\.<\|user\|>⟧\nSure\?<\|assistant\|>\n⟦Quite sure\.<\|user\|>⟧",
    ),
    # The prompt opens a thought block, which the rows do not fill: the answer alone is trained.
    (
        "think_opened_by_prompt.jinja",
        "one_turn",
        r"assistant\n<think>\n\n</think>\n\n⟦(Yes|No)<\|im_end\|>⟧",
    ),
]


@pytest.mark.parametrize(("template", "name", "shown"), TEMPLATES)
def test_a_template_trains_the_whole_answer_and_its_stop_token(
    template: str,
    name: str,
    shown: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--chat-template", FILES / template)
    assert prepared(spaced(model, tmp_path), tmp_path / "out", f"{name}.jsonl", *flags) == 0
    assert re.search(shown + r"\s*$", sample(tmp_path / "out", capsys))


def spaced(model: Path, folder: Path) -> Path:
    """Return a copy of the model's tokenizer in which " No" and " Yes" are tokens."""
    from tokenizers import Tokenizer

    raw = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, merges = raw["model"]["vocab"], raw["model"]["merges"]
    for word in ("ĠNo", "ĠYes"):
        left = word[0]
        for letter in word[1:]:
            merges.append([left, letter])
            left += letter
            vocabulary.setdefault(left, len(vocabulary))
    out = folder / "spaced"
    out.mkdir()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (out / name).write_bytes((model / name).read_bytes())
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>"])
    tokenizer.save(str(out / "tokenizer.json"))
    return out


def test_a_system_text_in_the_last_user_message_gives_a_sample_for_each_turn(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--chat-template", FILES / "system_in_last_user.jinja")
    assert prepared(model, tmp_path / "out", "system_two_turns.jsonl", *flags) == 0
    meta = load_meta(tmp_path / "out")
    assert meta.train_documents + meta.val_documents == 40
    found = {sample(tmp_path / "out", capsys, "--sample", str(n)).strip() for n in range(36)}
    first = r"\[INST\] Be brief\.\n\nIs (\d+) even\?\[/INST\]⟦ (Yes|No)\.<\|im_end\|>⟧"
    second = (
        r"\[INST\] Is (\d+) even\?\[/INST\] (Yes|No)\.<\|im_end\|>"
        r"\[INST\] Be brief\.\n\nSure\?\[/INST\]⟦ Quite sure\.<\|im_end\|>⟧"
    )
    assert all(re.fullmatch(first, each) or re.fullmatch(second, each) for each in found)
    assert len(found) == 36 and any(re.fullmatch(first, each) for each in found)


CALL = r"<tool_call>\n\{\"name\": \"room_temp\", \"arguments\": \{\"room\": \d+\}\}\n</tool_call>"
TOOLS = [
    ("tools_empty_content.jsonl", rf"assistant\n⟦<think>\n\n</think>\n\n{CALL}<\|im_end\|>⟧"),
    (
        "null_content_tool_role.jsonl",
        r"<tool_call>\n\{\"name\": \"add\", \"arguments\": \{\}\}\n</tool_call><\|im_end\|>",
    ),
    ("functions_key.jsonl", r"\"name\": \"room_temp\"[\s\S]*20 degrees<\|im_end\|>⟧"),
    (
        "reasoning_content.jsonl",
        r"⟦<think>\nI count up\.\n</think>\n\nIt is \d+\.<\|im_end\|>⟧",
    ),
]


@pytest.mark.parametrize(("name", "shown"), TOOLS)
def test_calls_results_tools_and_thoughts_are_rendered_by_a_template_that_has_them(
    name: str,
    shown: str,
    model: Path,
    with_tools: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert prepared(model, tmp_path / "out", name, "--chat-template", with_tools) == 0
    assert re.search(shown, sample(tmp_path / "out", capsys))


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("tools_empty_content.jsonl", "tool"),
        ("functions_key.jsonl", "functions|tools"),
        ("reasoning_content.jsonl", "reasoning_content"),
        ("images.jsonl", r"'images' \(20 rows\)"),
        # transformers refuses its null content; the message names that.
        ("null_content_tool_role.jsonl", "content"),
    ],
)
def test_what_the_template_leaves_out_is_named_before_anything_is_written(
    name: str, lost: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepared(model, tmp_path / "out", name) == ExitCode.CONFIG
    assert re.search(lost, capsys.readouterr().err)
    assert not (tmp_path / "out" / "meta.json").exists()


def test_a_call_of_sharegpt_is_a_call_of_a_tool(
    model: Path, with_tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--chat-template", with_tools)
    assert prepared(model, tmp_path / "unnamed", "sharegpt_tools.jsonl", *flags) == ExitCode.CONFIG
    assert "a function call without a name" in capsys.readouterr().err
    text = (FILES / "sharegpt_tools.jsonl").read_text(encoding="utf-8")
    named = text.replace('"{}"', json.dumps(json.dumps({"name": "add", "arguments": {}})))
    path = tmp_path / "named.jsonl"
    path.write_text(named, encoding="utf-8")
    assert named != text
    assert data(prepare_words(model, path, tmp_path / "out", *flags)) == 0
    shown = sample(tmp_path / "out", capsys)
    assert '{"name": "add", "arguments": {}}' in shown
    assert "<tool_response>\n3\n</tool_response>" in shown


SURE = rf"WRONG<\|im_end\|>\n{re.escape(_USER)}Sure\?<\|im_end\|>\n{re.escape(_ANSWER)}⟦It is"
SYSTEM = rf"^{re.escape(_START)}system\nAnswer in French\.<\|im_end\|>\n{re.escape(_USER)}What"
ROWS = [
    ("weight.jsonl", SURE),
    ("train_flag.jsonl", SURE),
    ("system_prompt_completion.jsonl", SYSTEM),
    (
        "history_alpaca.jsonl",
        rf"Remember \d+\.<\|im_end\|>\n{re.escape(_ANSWER)}⟦?Done\.<\|im_end\|>⟧?\n"
        rf"{re.escape(_USER)}And now double it\.<\|im_end\|>\n{re.escape(_ANSWER)}⟦It is \d+\.",
    ),
    ("prompt_history.jsonl", rf"{re.escape(_ANSWER)}Let me think\.<\|im_end\|>[\s\S]*⟦It is"),
]


@pytest.mark.parametrize(("name", "shown"), ROWS)
def test_the_keys_of_a_row_decide_what_is_trained(
    name: str, shown: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepared(model, tmp_path / "out", name) == 0
    assert re.search(shown, sample(tmp_path / "out", capsys))


def test_a_system_column_begins_both_conversations_of_a_pair(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepared(model, tmp_path / "out", "system_preference.jsonl", task="preference") == 0
    shown = sample(tmp_path / "out", capsys)
    assert len(re.findall(SYSTEM, shown, re.MULTILINE)) == 2


@pytest.mark.parametrize("name", ["kto.jsonl", "kto_messages.jsonl"])
def test_rows_that_are_marked_bad_are_left_out_and_counted(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = prepare_words(model, FILES / name, tmp_path / "out")
    words.remove("--quiet")
    assert data(words) == ExitCode.OK
    assert re.search(r"\b10 rows\b[^\n]*label", capsys.readouterr().err)
    meta = load_meta(tmp_path / "out")
    assert meta.train_documents + meta.val_documents == 10
    shown = [sample(tmp_path / "out", capsys, "--sample", str(n)) for n in range(3)]
    assert all("No idea" not in each for each in shown)


ANSWERED = r"What is \d+ plus \d+\?[\s\S]*⟦It is \d+\."
COMMON: list[tuple[str, tuple[str, ...], str]] = [
    ("content_parts.jsonl", (), ANSWERED),
    ("role_content_conversations.jsonl", (), ANSWERED),
    ("developer.jsonl", (), r"(developer|system)\nBe brief\.[\s\S]*⟦It is \d+\."),
    ("question_answer.jsonl", (), ANSWERED),
    ("question_answer.jsonl", ("--columns", "question=user,answer=assistant"), ANSWERED),
    ("array.json", (), ANSWERED),
    ("json_folder", (), ANSWERED),
]


@pytest.mark.parametrize(("name", "flags", "shown"), COMMON)
def test_common_formats_are_accepted(
    name: str,
    flags: tuple[str, ...],
    shown: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert prepared(model, tmp_path / "out", name, *flags) == 0
    assert re.search(shown, sample(tmp_path / "out", capsys))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("content_parts.jsonl", ()),
        ("question_answer.jsonl", ("--columns", "question=user,answer=assistant")),
        ("kto.jsonl", ()),
    ],
)
def test_finetune_recognises_conversations(
    name: str, flags: tuple[str, ...], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--data", str(FILES / name), "--dry-run", *flags]
    assert finetune(words) == ExitCode.OK
    out = capsys.readouterr().out
    assert "--task chat" in out and 'kind = "chat"' in out
    assert all(flag in out for flag in flags)


def test_files_named_train_and_valid_are_splits_and_test_is_untouched(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepared(model, tmp_path / "out", "split_folder") == 0
    meta = load_meta(tmp_path / "out")
    assert (meta.train_documents, meta.val_documents) == (20, 20)
    for split, name in (("train", "train"), ("val", "valid")):
        texts = [
            sample(tmp_path / "out", capsys, "--split", split, "--sample", str(number))
            for number in range(20)
        ]
        assert all(f"\n{name} " in text for text in texts)


@pytest.mark.parametrize(
    ("template", "flags", "line"),
    [
        (
            "think_opened_by_prompt.jinja",
            ("--thoughts", "empty"),
            "thoughts: the prompt opens a block of thoughts (<think>), and reasoning_content is "
            "not rendered; --thoughts empty trains the end of the block before an answer without a "
            "thought",
        ),
        (
            None,
            (),
            "thoughts: the prompt has no block of thoughts, and reasoning_content is rendered; "
            "--thoughts keep trains the thoughts that the template renders",
        ),
    ],
)
def test_prepare_prints_what_the_template_does_with_thoughts(
    template: str | None,
    flags: tuple[str, ...],
    line: str,
    model: Path,
    with_tools: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = with_tools if template is None else FILES / template
    words = prepare_words(model, FILES / "one_turn.jsonl", tmp_path / "out", *flags)
    words += ["--chat-template", str(path)]
    words.remove("--quiet")
    assert data(words) == ExitCode.OK
    assert line in " ".join(capsys.readouterr().err.split())
