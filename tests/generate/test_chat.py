"""`python -m payload.generate --chat` chats with the model's chat template."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import DataError, ExitCode
from payload.data.templates.chat_template import read_chat_template
from payload.generate.__main__ import main
from payload.generate.answers import chat_format
from payload.generate.codec import find_codec
from payload.train.models.hf_weights import save_hf
from tests.generate.models import make_model

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# transformers writes "no limit" as this integer of 31 digits.
CONFIG = '{"eos_token": "<|endoftext|>", "model_max_length": 1000000000000000019884624838656}'

pytestmark = pytest.mark.processes  # a process renders the template

Talk = Callable[..., int]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a chat template and a tokenizer_config.json as transformers writes it."""
    save_hf(make_model(sequence_length=256), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(CONFIG, encoding="utf-8")
    return tmp_path


@pytest.fixture
def talk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Run the command with these lines on stdin."""

    def run(lines: str, *arguments: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        short = ["--max-new-tokens", "8", "--temperature", "0"]
        return main(["--checkpoint", str(folder), "--chat", *short, *arguments])

    return run


def test_json_has_one_line_for_each_question(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("Hello\n\nAnd then?\n", "--json", "--system", "Be brief.") == ExitCode.OK
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["prompt"] for row in rows] == ["Hello", "And then?"]
    assert all(row["text"] and row["num_tokens"] == 8 for row in rows)
    assert "Traceback" not in said.err


def test_text_is_each_answer_and_one_line_end(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("Hello\n", "--json") == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)["text"]
    assert talk("Hello\n") == ExitCode.OK
    out = capsys.readouterr().out
    assert out.endswith("\n") and out.strip() == answer


def test_a_conversation_that_outgrows_the_context_forgets_its_oldest_messages(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("word " * 110 + "\n" + "more " * 110 + "\n" + "last\n", "--json") == ExitCode.OK
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3
    assert "no longer fit into the context" in said.err


def test_a_message_that_is_too_long_is_refused_and_the_conversation_continues(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("word " * 400 + "\nHello\n", "--json") == ExitCode.OK
    said = capsys.readouterr()
    assert [json.loads(line)["prompt"] for line in said.out.splitlines()] == ["Hello"]
    assert "Shorten the message" in said.err


def test_the_template_gives_what_transformers_gives(folder: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n<b> & 'c' é"},
        {"role": "assistant", "content": "x"},
    ]
    for add in (True, False):
        # Any: the annotation has one string, but the value is a list of strings.
        rendered: Any = render_jinja_template(
            [messages], chat_template=CHATML, add_generation_prompt=add
        )
        (expected,) = rendered[0]
        found = read_chat_template(folder).render(messages, add_generation_prompt=add)
        assert found == expected


@pytest.mark.parametrize("content", ["It is", "  It is", "It is "])
@pytest.mark.parametrize("strips", [False, True])
def test_a_final_message_of_the_assistant_is_continued_as_in_transformers(
    content: str, strips: bool, folder: Path
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    text = CHATML.replace("message['content']", "message['content'] | trim") if strips else CHATML
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    messages = [{"role": "user", "content": "It is?"}, {"role": "assistant", "content": content}]
    # Any: the annotation has one string, but the value is a list of strings.
    rendered: Any = render_jinja_template(
        [messages], chat_template=text, continue_final_message=True
    )
    form = chat_format(read_chat_template(folder), find_codec(folder))
    assert form.prompt(messages) == rendered[0][0]


def test_a_final_message_without_text_cannot_be_continued(folder: Path) -> None:
    form = chat_format(read_chat_template(folder), find_codec(folder))
    with pytest.raises(DataError, match=r"End with a message of the user\."):
        form.prompt([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('this model takes no system message') }}",
        "{% for x in %}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content + 1 }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_one_line(template: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(DataError) as raised:
        read_chat_template(folder).render(
            [{"role": "user", "content": "a"}], add_generation_prompt=True
        )
    assert len(str(raised.value).splitlines()) == 1


def test_a_model_without_a_template_says_so(
    folder: Path, talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "chat_template.jinja").unlink()
    assert talk("Hello\n") == ExitCode.CONFIG
    assert "has no chat template" in capsys.readouterr().err


TOOLS = '[{"name": "add", "parameters": {"type": "object", "properties": {}}}]'


def test_prompts_are_answered_in_conversations_of_their_own(
    talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "And then?"}]
    prompts.write_text(
        "\n".join(json.dumps(each) for each in ("Hello", {"messages": messages})), encoding="utf-8"
    )
    assert talk("", "--prompts-file", str(prompts), "--json") == ExitCode.OK
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["Hello", messages]
    for question, row in zip(("Hello", "And then?"), rows, strict=True):
        assert talk(f"{question}\n", "--json") == ExitCode.OK
        alone = json.loads(capsys.readouterr().out)
        (sample,) = row["samples"]
        assert sample["text"] == alone["text"] and sample["num_tokens"] == alone["num_tokens"]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{}", "not a list of one or more tools"),
        ("[]", "not a list of one or more tools"),
        ('[{"parameters": {}}]', "has no name"),
        ("[", "not JSON"),
        (TOOLS, "does not write tools"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(
    content: str, part: str, talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(content, encoding="utf-8")
    assert talk("Hello\n", "--tools", str(tools)) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert part in error.splitlines()[-1] and "Traceback" not in error


def test_an_answer_ends_at_the_token_that_ends_the_templates_turns(folder: Path) -> None:
    source = "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    codec = find_codec(folder)
    found = chat_format(read_chat_template(folder), replace(codec, stop_tokens=frozenset()))
    assert found.stop_tokens == codec.stop_tokens != frozenset()


@pytest.mark.parametrize("wrong", [["--num-samples", "2"], ["--input", "a"]])
def test_options_without_a_meaning_in_a_chat_are_refused(wrong: list[str], folder: Path) -> None:
    try:
        code = main(["--checkpoint", str(folder), "--chat", *wrong])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == ExitCode.USAGE
