"""A chat template is an untrusted program, with limits on its cost and its output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from payload.core.errors import DataError, ExitCode
from payload.data.__main__ import main
from payload.data.rows.conversation import Conversation, Message
from payload.data.templates import template_process
from payload.data.templates.chat_template import ChatTemplate, load_chat_template
from payload.data.templates.turns import render_samples
from tests.support.chat_data import make_tokenizer, prepare_words, write_rows

pytestmark = pytest.mark.processes

MESSAGES = [
    {"role": "user", "content": "two and two"},
    {"role": "assistant", "content": " four "},
]


def conversation(messages: Sequence[Message]) -> Conversation:
    return Conversation(
        messages=tuple(messages), trained=tuple(each["role"] == "assistant" for each in messages)
    )


CONVERSATION = conversation(MESSAGES)
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
AROUND = MARKED.replace("{% generation %}", "{% set part %}{% generation %}").replace(
    "{% endgeneration %}", "{% endgeneration %}{% endset %}{{ HERE }}"
)


def trained(made: ChatTemplate, messages: Sequence[Message] = MESSAGES) -> list[str]:
    (sample,) = render_samples(made, conversation(messages))
    return [sample.text[start:end] for start, end in sample.spans]


def template(tmp_path: Path, source: str) -> ChatTemplate:
    path = tmp_path / "chat_template.jinja"
    path.write_text(source, encoding="utf-8")
    return load_chat_template(path, tokenizer=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{% break %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages | xmlattr }}",
        "{{ {'a b': 1} | xmlattr }}",
        "{{ 10 ** 5000 }}",
        "{{ messages[0].content.encode('utf-16') | tojson }}",
        "{{ '\\ud800' }}",
        "{% set f = namespace(x='a' * 1000) %}{% for _ in range(40) %}"
        "{% set f.x = f.x + f.x %}{% endfor %}{{ f.x | length }}",
        "{{ 'a' * (70 * 2 ** 20) }}",
        "(" * 100_000,
        "{{ " + "(" * 100_000 + " }}",
    ],
    ids=lambda source: source[:24],
)
def test_a_template_that_fails_in_its_own_way_is_one_line(source: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        render_samples(template(tmp_path, source + "{{ messages[9].content + 1 }}"), CONVERSATION)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{% set n = messages | length + 7 %}{{ n ** (n ** n) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_ended(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "CPU_SECONDS", 1)
    with pytest.raises(DataError, match="it used over 1 s of processor time"):
        template(tmp_path, source).render(MESSAGES, add_generation_prompt=False)


def test_after_a_conversation_that_ended_the_process_the_next_one_is_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "CPU_SECONDS", 1)
    slow = "{% if messages[0].content == 'slow' %}{{ 9 ** (9 ** messages[0].n | int) }}{% endif %}"
    made = template(tmp_path, slow + PLAIN)
    for _ in range(2):
        with pytest.raises(DataError, match="processor time"):
            slowly = [{"role": "user", "content": "slow", "n": "9"}]
            made.render(slowly, add_generation_prompt=False)
        assert made.render(MESSAGES, add_generation_prompt=False).startswith("<|user|>two")


@pytest.mark.parametrize(
    "change",
    ["part[1:]", "part | trim", "part | upper", "part | reverse", "part ~ part | length"],
)
def test_a_template_that_changes_its_marked_part_is_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"changes the text of its \{% generation %\} blocks"):
        render_samples(template(tmp_path, AROUND.replace("HERE", change)), CONVERSATION)


def test_a_block_in_a_block_is_refused(tmp_path: Path) -> None:
    nested = MARKED.replace("{{ m.content }}", "{% generation %}a{% endgeneration %}", 1)
    with pytest.raises(DataError, match="or nests them"):
        render_samples(template(tmp_path, nested), CONVERSATION)


@pytest.mark.parametrize(
    "mark", ["{%+ generation %}", "{%- generation -%}", "{%generation%}", "{%\ngeneration +%}"]
)
def test_every_way_of_writing_the_block_marks_the_assistants_part(
    mark: str, tmp_path: Path
) -> None:
    made = template(tmp_path, MARKED.replace("{% generation %}", mark))
    assert trained(made) == [" four <|user|>"]
    assert "trained on: the template's {% generation %} blocks" in made.how_trained()


def test_a_block_that_is_only_quoted_marks_nothing(tmp_path: Path) -> None:
    quoted = "{% raw %}{% generation %}{% endraw %}{# {% generation %} #}"
    made = template(tmp_path, quoted + PLAIN)
    assert trained(made) == ["<|assistant|> four <|user|>"]


@pytest.mark.slow
def test_a_short_conversation_cannot_become_a_long_text(tmp_path: Path) -> None:
    made = template(tmp_path, "{{ ' ' * (60 * 2 ** 20) }}" + PLAIN)
    with pytest.raises(
        DataError, match=r"is too long: over 1,049,\d\d\d characters from 30 characters of mess"
    ):
        render_samples(made, CONVERSATION)
    long = [{"role": "user", "content": "x" * 2**20}]
    eight = template(tmp_path, "{{ messages[0].content * 8 }}")
    assert len(eight.render(long, add_generation_prompt=False)) == 2**23


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 200000000 }}",
        "{{ 'x' | center(200000000) }}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{{ i }}abc{% endfor %}{% endfor %}",
    ],
)
def test_an_output_that_is_too_long_ends_at_the_limit_and_is_not_computed_before(
    source: str, tmp_path: Path
) -> None:
    # As part of the compiled program, the text would be in the memory of the process several times.
    made = template(tmp_path, source + PLAIN)
    with pytest.raises(DataError, match=r"chat_template\.jinja: its output is too long: over 1,"):
        render_samples(made, CONVERSATION)


def test_a_long_constant_is_not_in_the_compiled_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "MEMORY_BYTES", 300 * 2**20)
    made = template(tmp_path, "{% if false %}{{ 'x' * 100000000 }}{% endif %}" + PLAIN)
    assert trained(made) == ["<|assistant|> four <|user|>"]


@pytest.mark.slow
def test_consecutive_rows_that_end_the_process_are_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(template_process, "CPU_SECONDS", 1)
    monkeypatch.setattr(template_process, "MAX_CONSECUTIVE_ENDS", 3)
    model = make_tokenizer(
        tmp_path / "model", template="{% set n = messages | length + 7 %}{{ n ** (n ** n) }}"
    )
    source = write_rows(tmp_path / "in.jsonl", [{"messages": MESSAGES}] * 40)
    words = prepare_words(model, source, tmp_path / "out", "--skip-bad")
    assert main(words) == ExitCode.CONFIG
    message = capsys.readouterr().err
    assert "3 consecutive conversations failed: it used over 1 s" in message
    assert message.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", [PLAIN, MARKED, AROUND.replace("HERE", "part")])
def test_the_assistants_part_is_found(source: str, tmp_path: Path) -> None:
    made = template(tmp_path, source)
    (sample,) = render_samples(made, conversation([*MESSAGES, *MESSAGES]))
    # The tokenizer has no stop token, so the mark of the next message ends a turn.
    assert sample.text == "<|user|>two and two<|assistant|> four " * 2 + "<|user|>"
    parts = trained(made, [*MESSAGES, *MESSAGES])
    assert parts == (["<|assistant|> four <|user|>"] if source == PLAIN else [" four <|user|>"]) * 2


def test_a_fork_starts_a_separate_process(tmp_path: Path) -> None:
    made = template(tmp_path, PLAIN)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        text = made.render([{"role": "user", "content": "child"}], add_generation_prompt=False)
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"<|user|>child"
    for each in (read, write):
        os.close(each)
    assert made.render(MESSAGES[:1], add_generation_prompt=False) == "<|user|>two and two"
