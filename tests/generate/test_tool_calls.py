"""Answers with tool calls and thoughts are divided in the format of each model's own template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl

from payload.core.errors import ConfigError, DataError
from payload.data.templates.chat_template import load_chat_template
from payload.generate.answers import Answer, ChatFormat, chat_format
from payload.generate.call_formats import ToolCall
from payload.generate.codec import find_codec
from payload.generate.tool_calls import after_prompt
from payload.train.models.hf_weights import save_hf
from tests.generate.models import make_model

pytestmark = pytest.mark.processes  # a process renders each template

FOLDER = Path(trl.__file__).parent / "chat_templates"
TOKENS = '{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>", "unk_token": "<u>"}'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Return the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A city."},
                    "days": {"type": "integer", "description": "Days from today."},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "send_mail",
            "description": "Send a message.",
            "parameters": {
                "type": "object",
                "properties": {"to": {"type": "string", "description": "An address."}},
                "required": ["to"],
            },
        },
    },
]
CALLS = (
    ToolCall(name="get_weather", arguments={"city": 'São "Paulo" & <b>', "days": 3}),
    ToolCall(name="send_mail", arguments={"to": "a@b.c"}),
)
WITHOUT_CALLS = {
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3",
    "lfm2", "llama3", "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm",
}  # fmt: skip
"""Templates that write no calls, with their training variants."""
ONE_CALL = {"gptoss", "llama3_1", "llama3_2"}
"""Templates that write at most one call in an answer."""
OF_EACH_KIND = ["qwen3", "llama3_2", "gptoss", "qwen3_8", "gemma4_v5", "lfm2_v2"]

Format = Callable[[str], ChatFormat]


@pytest.fixture(scope="module")
def format_of(tmp_path_factory: pytest.TempPathFactory) -> Format:
    """Return the format of one of TRL's templates."""
    folder = tmp_path_factory.mktemp("model")
    save_hf(make_model(sequence_length=64), folder)
    (folder / "tokenizer_config.json").write_text(TOKENS, encoding="utf-8")
    codec = find_codec(folder)

    def make(name: str) -> ChatFormat:
        template = load_chat_template(FOLDER / f"{name}.jinja", tokenizer=folder)
        return chat_format(template, codec, tools=TOOLS)

    return make


def written(form: ChatFormat, answer: Answer) -> tuple[str, str]:
    """Return the prompt, and the answer as the template writes it."""
    messages = [{"role": "user", "content": "Will it rain?"}]
    prompt = form.prompt(messages)
    whole = form.template.render(
        [*messages, form.message(answer)], add_generation_prompt=False, tools=form.tools
    )
    return prompt, after_prompt(whole, prompt)


def require_division(form: ChatFormat, answer: Answer) -> None:
    """Fail unless the written answer is divided as it was, and each part only grows."""
    prompt, text = written(form, answer)
    found = form.divide(text, prompt=prompt, is_finished=True)
    assert found.calls == answer.calls
    assert not answer.text or found.text.startswith(answer.text)
    before = Answer()
    for size in range(len(text)):
        now = form.divide(text[:size], prompt=prompt, is_finished=False)
        assert now.text.startswith(before.text) and now.thoughts.startswith(before.thoughts)
        assert found.text.startswith(now.text) and found.thoughts.startswith(now.thoughts)
        before = now


def require_calls(form: ChatFormat, name: str) -> None:
    require_division(form, Answer(calls=CALLS[:1]))
    if name.removesuffix("_training") not in ONE_CALL:
        require_division(form, Answer(calls=CALLS))


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_calls_are_found_as_the_template_writes_them(name: str, format_of: Format) -> None:
    require_calls(format_of(name), name)


@pytest.mark.seeds
@pytest.mark.slow
def test_calls_are_found_for_every_template_of_trl(format_of: Format) -> None:
    found, without = [], set()
    for path in sorted(FOLDER.glob("*.jinja")):
        try:
            form = format_of(path.stem)
        except ConfigError:
            without.add(path.stem.removesuffix("_training"))
            continue
        if form.calls is None:
            without.add(path.stem.removesuffix("_training"))
            continue
        require_calls(form, path.stem)
        found.append(path.stem)
    assert without == WITHOUT_CALLS
    assert len(found) >= 44


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "qwen3_8"])
def test_thoughts_are_separated_from_the_answer(name: str, format_of: Format) -> None:
    form = format_of(name)
    thoughts = "It may.\nOr <not>."
    prompt, text = written(form, Answer(text="Yes, it will.", thoughts=thoughts))
    found = form.divide(text.partition("Yes, it will.")[0] + "Yes, it will.", prompt=prompt,
                        is_finished=True)  # fmt: skip
    assert found == Answer(text="Yes, it will.", thoughts=thoughts)


def test_an_unfinished_thought_is_no_answer(format_of: Format) -> None:
    form = format_of("qwen3")
    prompt = form.prompt([{"role": "user", "content": "a"}])
    assert form.divide("<think>\nhm", prompt=prompt, is_finished=True) == Answer(thoughts="hm")
    assert form.divide("<thi", prompt=prompt, is_finished=False) == Answer()


def test_json_of_another_kind_is_text(format_of: Format) -> None:
    form = format_of("llama3_2")
    prompt = form.prompt([{"role": "user", "content": "a"}])
    for text in ('{"name": "unknown", "parameters": {}}', '{"city": 1}', '{"name": "get_weather"'):
        found = form.divide(text, prompt=prompt, is_finished=True)
        assert found == Answer(text=text)


def test_tools_that_the_model_would_not_see_are_refused(format_of: Format) -> None:
    with pytest.raises((ConfigError, DataError), match="does not write tools"):
        format_of("llama3")
