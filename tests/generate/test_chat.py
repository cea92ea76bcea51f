"""`python -m payload.generate --chat` chats with the model's chat template."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import DataError, ExitCode
from payload.data.templates.chat_template import read_chat_template
from payload.generate.__main__ import main
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
    assert "Shorten it" in said.err


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


@pytest.mark.parametrize("wrong", [["--num-samples", "2"], ["--prompt", "a"]])
def test_options_without_a_meaning_in_a_chat_are_refused(wrong: list[str], folder: Path) -> None:
    try:
        code = main(["--checkpoint", str(folder), "--chat", *wrong])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == ExitCode.USAGE
