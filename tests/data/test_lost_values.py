"""A part of a row that the template leaves out is named, and the row is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import DataError, ExitCode
from payload.data.__main__ import main as data
from payload.data.rows.conversation import Conversation
from payload.data.templates.chat_template import ChatTemplate, read_chat_template
from payload.data.templates.turns import SampleOptions, render_samples
from tests.support.chat_data import END, PLAIN_TEMPLATE, make_tokenizer, turn, write_rows

pytestmark = pytest.mark.processes  # a process renders the template


def read(folder: Path, template: str) -> ChatTemplate:
    return read_chat_template(make_tokenizer(folder, template=template))


def shown(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """Return the trained texts of the only sample."""
    trained = tuple(each["role"] == "assistant" for each in messages)
    made = Conversation(messages=tuple(messages), trained=trained)
    (sample,) = render_samples(template, made, SampleOptions(**options))
    return [sample.text[start:end] for start, end in sample.spans]


NAMED = PLAIN_TEMPLATE.replace(
    "message['role'] +", "message['role'] + message.name | default('') +"
)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_the_name_of_a_speaker_is_rendered_or_the_row_is_refused(role: str, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "a to Bob5x"}, *turn("b", "c")]
    messages = [{**each, "name": "Bob5x"} if each["role"] == role else each for each in messages]
    place = [each["role"] for each in messages].index(role) + 1
    plain, named = (
        read(tmp_path / name, each) for name, each in (("p", PLAIN_TEMPLATE), ("n", NAMED))
    )
    with pytest.raises(
        DataError, match=f"message {place} of 3: the template leaves out the key 'na"
    ):
        shown(plain, messages)
    assert shown(plain, messages, ignored_keys=frozenset({"name"})) == [f"c{END}"]
    assert shown(named, messages)


def test_an_ignored_name_stays_in_calls_and_functions(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    row = {
        "messages": [
            {"role": "user", "name": "Bob", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": "2"},
            {"role": "assistant", "content": "b"},
        ],
        "functions": [{"name": "add", "parameters": {}}],
    }
    model = make_tokenizer(tmp_path / "model")
    source = write_rows(tmp_path / "in.jsonl", [row] * 3)
    flags = ["--chat-template", "trl:qwen2_5", "--model", str(model)]
    assert data(["show", str(source), *flags]) == ExitCode.CONFIG
    assert data(["show", str(source), *flags, "--ignore-key", "name"]) == ExitCode.OK


def test_calls_that_are_ignored_leave_a_message_without_content(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    row = {"messages": [*turn("a", "b"), {"role": "assistant", "tool_calls": [call]}]}
    source = write_rows(tmp_path / "in.jsonl", [row] * 3)
    words = ["show", str(source), "--model", str(make_tokenizer(tmp_path / "model"))]
    assert data(words) == ExitCode.CONFIG
    assert data([*words, "--ignore-key", "tool_calls"]) == ExitCode.OK


SPLIT_THOUGHT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ '<think>\n' + m.content.split('</think>')[0].split('<think>')[-1].strip() }}"
    "{{ '\n</think>\n\n' + m.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen3's template: it keeps one thought and the text after the last block."""


@pytest.mark.parametrize(
    ("content", "lost"),
    [
        ("<think>one two</think>three four", None),
        ("one two</think>three four", None),
        ("<think>a</think>b", None),
        ("Sure.\n<think>one two</think>three four", "Sure."),
        ("a <think>one two</think>three four", "a"),
        ("<think>one two</think>red blue<think>three</think>four", "red blue"),
    ],
)
def test_a_part_of_an_answer_that_the_template_leaves_out_is_named(
    content: str, lost: str | None, tmp_path: Path
) -> None:
    template = read(tmp_path, SPLIT_THOUGHT)
    if lost is None:
        assert shown(template, turn("a", content))
        return
    with pytest.raises(DataError) as caught:
        shown(template, turn("a", content))
    assert f"message 2 of 2: the template leaves out the text {lost!r} of" in str(caught.value)
    assert "--ignore-key" not in str(caught.value)
    plain = read(tmp_path / "plain", PLAIN_TEMPLATE)
    assert shown(plain, turn("a", content)) == [content + END]


@pytest.mark.parametrize("cut", ["[:9]", ".split('\n')[0]", ".split('\n')[-1]"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_template_that_cuts_a_content_is_refused(cut: str, role: str, tmp_path: Path) -> None:
    messages = turn("one two three\nred blue add", "list file open\nwhat is one two")
    inner = f"(message['content']{cut} if message.role == '{role}' else message['content'])"
    template = read(tmp_path, PLAIN_TEMPLATE.replace("message['content']", inner))
    with pytest.raises(DataError, match="the template leaves out the text"):
        shown(template, messages)


def test_dropping_a_thought_keeps_the_text_before_it(tmp_path: Path) -> None:
    template = read(tmp_path, PLAIN_TEMPLATE)
    content = "Sure. <think>one two</think>three"
    assert shown(template, turn("a", content), thoughts="drop") == [f"Sure. three{END}"]
