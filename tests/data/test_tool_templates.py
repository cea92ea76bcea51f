"""Rows with tool calls, for templates with and without tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import DataError, ExitCode
from payload.data.__main__ import main as data
from payload.data.rows.conversations import conversation_of
from payload.data.templates.chat_template import load_chat_template, read_chat_template
from payload.data.templates.turns import render_samples
from tests.support.chat_data import PLAIN_TEMPLATE, make_tokenizer, write_rows

pytestmark = pytest.mark.processes  # a process renders the template

_GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "chat.md"
_KNOWS_CALLS = PLAIN_TEMPLATE.replace(
    "{{ '<|im_start|>'", "{{ message.tool_calls | default('') }}{{ '<|im_start|>'"
)


def example() -> dict[str, Any]:
    """Return the row with a tool call in the guide."""
    section = _GUIDE.read_text(encoding="utf-8").split("## You have logs with tool calls")[1]
    row: dict[str, Any] = json.loads(section.split("```json")[1].split("```")[0])
    return row


@pytest.mark.parametrize("content", [None, "", "absent"])
def test_a_call_that_the_template_leaves_out_is_named_whatever_its_content(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, model = example(), make_tokenizer(tmp_path / "model")
    row["messages"][1]["content"] = content
    if content == "absent":
        del row["messages"][1]["content"]
    source = write_rows(tmp_path / "in.jsonl", [row])
    assert data(["show", str(source), "--model", str(model)]) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "message 2 of 4: the template leaves out the key 'tool_calls'" in said
    assert "--chat-template trl:qwen2_5" in said and "trained for chat" not in said
    flags = ["--chat-template", "trl:qwen2_5"]
    assert data(["show", str(source), "--model", str(model), *flags]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert '⟦<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}' in shown
    assert "⟦21 degrees.<|im_end|>⟧" in shown


def test_a_rejection_by_a_template_with_tools_has_the_reason_of_the_template(
    tmp_path: Path,
) -> None:
    template = read_chat_template(make_tokenizer(tmp_path, template=_KNOWS_CALLS))
    with pytest.raises(DataError) as caught:
        render_samples(template, conversation_of(example()))
    assert "leaves out" not in str(caught.value)


@pytest.mark.parametrize("name", ["qwen", "../chat_templates/qwen2_5", "/etc/passwd"])
def test_an_unknown_template_of_trl_is_refused_with_the_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not have this template.*qwen2_5, "):
        load_chat_template(Path(f"trl:{name}"), tokenizer=make_tokenizer(tmp_path))


def broken(kind: str) -> dict[str, Any]:
    """Return the example with one fault in its call."""
    row = example()
    function = row["messages"][1]["tool_calls"][0]["function"]
    if kind == "arguments":
        function["arguments"] = '{"city": A-1}'
    elif kind == "name":
        function["name"] = "get_wether"
    elif kind == "id":
        row["messages"][2]["tool_call_id"] = "c2"
    return row


@pytest.mark.parametrize("task", ["chat", "preference"])
def test_faults_in_calls_are_counted_and_the_rows_are_trained(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [broken(kind) for kind in ("arguments", "name", "arguments", "id", *["none"] * 16)]
    if task == "preference":
        for row in rows:
            *prompt, answer = row.pop("messages")
            row |= {"prompt": prompt, "chosen": [answer], "rejected": [{**answer, "content": "5"}]}
    source = write_rows(tmp_path / "in.jsonl", rows)
    words = ["--model", str(make_tokenizer(tmp_path / "model")), "--chat-template", "trl:qwen2_5"]
    expected = (
        f"2 rows have tool arguments that are not valid JSON, for example {source} line 1\n",
        f"1 row has a call of a function that its tools lack, for example {source} line 2\n",
        "1 row has a tool result whose tool_call_id matches no earlier call, for example "
        f"{source} line 4\n",
    )
    assert data(["show", str(source), *words]) == ExitCode.OK
    shown = capsys.readouterr().err
    out = ["--input", str(source), "--out", str(tmp_path / "out"), "--dedup", "none"]
    assert data(["prepare", "--task", task, *words, *out]) == ExitCode.OK
    prepared = capsys.readouterr().err
    for line in expected:
        assert f"note: {line}" in shown and f"note: {line}" in prepared
