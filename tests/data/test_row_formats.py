"""Every common format of a row becomes the messages that transformers' templates take."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest

from payload.data.rows.columns import CHAT_FORMATS, format_of, is_deep
from payload.data.rows.conversation import Conversation
from payload.data.rows.conversations import (
    BadConversationError,
    UntrainedRowError,
    columns_of,
    conversation_of,
    unread_columns,
)
from payload.data.rows.messages import ROLES, read_messages
from payload.data.rows.preferences import preference_of
from tests.support.chat_data import turn

ROOM = {"name": "room_temp", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": ROOM}
ARGUMENTS = {"room": 3}
CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "room_temp", "arguments": ARGUMENTS},
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (
            {"from": "human", "values": "a"},
            "'from' and 'value'. Did you write 'values' for 'value'?",
        ),
        ({"form": "human", "value": "a"}, "'from' and 'value'. Did you write 'form' for 'from'?"),
        ({"role": "user", "contents": "a"}, "'role' and 'content'. Did you write 'contents' for"),
        ({"role": "user", "text": "a"}, "'role' and 'content'."),
        ({"name": "user", "text": "a"}, "'role' and 'content'."),
        ("a", "'role' and 'content'."),
    ],
)
def test_a_message_with_misspelt_keys_names_the_keys_of_its_own_form(
    message: object, complaint: str
) -> None:
    with pytest.raises(BadConversationError) as raised:
        conversation_of({"conversations": [message]})
    said = str(raised.value)
    assert complaint in said
    assert ("Did you write" in said) == ("Did you write" in complaint)


def test_a_list_of_one_answer_is_that_answer_and_several_name_the_fix() -> None:
    row = {"question": "a", "answer": ["b"]}
    assert read(row) == (turn("a", "b"), [False, True])
    with pytest.raises(BadConversationError) as raised:
        conversation_of({"question": "a", "answer": ["b", "c"]})
    assert "answer is a list of 2 texts, but a row has one. Write a row for each text" in str(
        raised.value
    )


def test_a_misspelt_column_is_named_with_its_known_name() -> None:
    with pytest.raises(BadConversationError) as raised:
        conversation_of({"id": 1, "Conversatoins": []})
    assert "Did you mean 'conversations' instead of 'Conversatoins'?" in str(raised.value)
    with pytest.raises(BadConversationError) as raised:
        conversation_of({"id": 1, "poem": "a"})
    assert "Did you mean" not in str(raised.value)


def read(row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return the messages of a row, and which are trained."""
    found = conversation_of(row)
    return [dict(each) for each in found.messages], list(found.trained)


@pytest.mark.parametrize("form", CHAT_FORMATS, ids=lambda form: "-".join(form.required()))
def test_a_row_with_the_columns_of_a_format_is_a_question_and_its_answer(form: Any) -> None:
    columns = form.required()
    row = (
        dict(zip(columns, ("a", "b"), strict=True)) if form.answer else {columns[0]: turn("a", "b")}
    )
    assert format_of(row) == form
    assert read(row) == (turn("a", "b"), [False, True])


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
@pytest.mark.parametrize(
    "names", [("role", "content", "user", "assistant"), ("from", "value", "human", "gpt")]
)
def test_each_list_of_messages_may_have_the_keys_of_openai_or_of_sharegpt(
    column: str, names: tuple[str, ...]
) -> None:
    role, content, *roles = names
    given = [{role: each, content: text} for each, text in zip(roles, "ab", strict=True)]
    assert read({column: given}) == (turn("a", "b"), [False, True])


@pytest.mark.parametrize("role", [each for each in ROLES if ROLES[each] != "function_call"])
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_a_message_of_a_role_and_a_text_is_read_like_any_other_mapping(
    role: str, keys: tuple[str, str]
) -> None:
    # Only the built-in dict takes the short path.
    for text in ("a", "", "x\ud800y"):
        message = dict(zip(keys, (role, text), strict=True))
        assert read_messages([message], "messages") == read_messages(
            [MappingProxyType(message)], "messages"
        )


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x, "b": 1}])
def test_a_value_of_100_levels_is_deep(wrap: Any) -> None:
    value: Any = "text"
    for _ in range(99):
        value = wrap(value)
    assert not is_deep(value)
    assert is_deep(wrap(value))
    assert is_deep(MappingProxyType({"a": value}))


def test_openai_s_tool_calls_keep_their_ids_and_arguments_become_objects() -> None:
    one = {**CALL, "function": {**CALL["function"], "arguments": json.dumps(ARGUMENTS)}}
    two = {**one, "id": "c2"}
    result = {"role": "tool", "tool_call_id": "c1", "name": "room_temp", "content": "21"}
    row = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            user("a"),
            assistant(None, tool_calls=[one, two]),
            result,
            {**result, "tool_call_id": "c2"},
            assistant("b", name="Ada"),
        ],
        "tools": [TOOL],
        "parallel_tool_calls": True,
    }
    messages, trained = read(row)
    assert messages == [
        {"role": "developer", "content": "Be brief."},
        user("a"),
        assistant(None, tool_calls=[CALL, {**CALL, "id": "c2"}]),
        result,
        {**result, "tool_call_id": "c2"},
        assistant("b", name="Ada"),
    ]
    assert trained == [False, False, True, False, False, True]
    assert conversation_of(row).tools == (TOOL,)
    assert unread_columns(row, columns_of(row)) == ["parallel_tool_calls"]


def test_openai_s_older_function_call_becomes_a_tool_call() -> None:
    call = {"name": "room_temp", "arguments": json.dumps(ARGUMENTS)}
    row = {
        "messages": [
            user("a"),
            {"role": "assistant", "function_call": call},
            {"role": "function", "name": "room_temp", "content": "21"},
            assistant("b"),
        ],
        "functions": [ROOM],
    }
    messages, _ = read(row)
    made = {"type": "function", "function": {"name": "room_temp", "arguments": ARGUMENTS}}
    assert messages[1] == assistant(None, tool_calls=[made])
    assert messages[2] == {"role": "tool", "name": "room_temp", "content": "21"}
    assert conversation_of(row).tools == (TOOL,)


def test_sharegpt_s_function_call_and_observation_and_tools_as_json_text() -> None:
    call = json.dumps({"name": "room_temp", "arguments": ARGUMENTS})
    row = {
        "system": "Be brief.",
        "tools": json.dumps([ROOM]),
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": call},
            {"from": "observation", "value": "21"},
            {"from": "gpt", "value": "b"},
        ],
    }
    made = {"type": "function", "function": {"name": "room_temp", "arguments": ARGUMENTS}}
    assert read(row) == (
        [
            {"role": "system", "content": "Be brief."},
            user("a"),
            assistant("", tool_calls=[made]),
            {"role": "tool", "content": "21"},
            assistant("b"),
        ],
        [False, False, True, False, True],
    )
    assert conversation_of(row).tools == (TOOL,)
    assert conversation_of({**row, "tools": "[]"}).tools == ()


def test_alpaca_has_context_system_and_earlier_turns() -> None:
    row = {
        "instruction": "a",
        "input": "more",
        "output": "b",
        "system": "s",
        "history": [["c", "d"], ["e", "f"]],
    }
    assert read(row) == (
        [
            {"role": "system", "content": "s"},
            *(each for pair in ("cd", "ef") for each in turn(*pair)),
            *turn("a\n\nmore", "b"),
        ],
        [False, False, True, False, True, False, True],
    )
    assert unread_columns(row, columns_of(row)) == []
    assert read({"instruction": "a", "context": "more", "response": "b"})[0] == turn(
        "a\n\nmore", "b"
    )


def test_the_turns_of_a_prompt_are_not_trained() -> None:
    prompt = [user("a"), assistant("x"), user("b")]
    row = {"prompt": prompt, "completion": [assistant("c")]}
    assert read(row) == ([*prompt, assistant("c")], [False, False, False, True])
    assert read({**row, "completion": "c"}) == read(row)
    assert read({"prompt": "a", "completion": "c"}) == (turn("a", "c"), [False, True])


@pytest.mark.parametrize("off", [{"weight": 0}, {"train": False}, {"weight": "0"}])
def test_a_message_with_weight_0_is_context(off: dict[str, Any]) -> None:
    messages = [user("a"), assistant("WRONG", **off), user("b"), assistant("c", weight=1)]
    assert read({"messages": messages}) == (
        [user("a"), assistant("WRONG"), user("b"), assistant("c")],
        [False, False, False, True],
    )


def test_thoughts_and_harmony_s_channels_are_kept() -> None:
    thinking = {"reasoning_content": "hm"}
    assert read({"messages": [user("a"), assistant("b", **thinking)]})[0][1] == assistant(
        "b", **thinking
    )
    harmony = [
        user("a"),
        assistant("I look.", channel="analysis"),
        assistant('{"room": 3}', channel="commentary", recipient="functions.room_temp"),
        {"role": "tool", "content": "21"},
        assistant("I know.", channel="analysis"),
        assistant("b", channel="final"),
    ]
    made = {"type": "function", "function": {"name": "room_temp", "arguments": ARGUMENTS}}
    assert read({"messages": harmony}) == (
        [
            user("a"),
            assistant("", tool_calls=[made], thinking="I look."),
            {"role": "tool", "content": "21"},
            assistant("b", thinking="I know."),
        ],
        [False, True, False, True],
    )
    with pytest.raises(BadConversationError, match="ends with a message with channel 'analysis'"):
        conversation_of({"messages": harmony[:2]})


def test_content_is_text_or_null_or_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = [user("x"), assistant("y")]
    messages[0]["content"] = parts
    assert read({"messages": messages})[0] == turn("ab", "y")
    assert read({"messages": [{"role": "user", "content": None}, assistant("y")]})[0][0] == {
        "role": "user",
        "content": None,
    }
    messages[0]["content"] = [*parts, {"type": "image_url", "image_url": {"url": "duck.jpg"}}]
    with pytest.raises(BadConversationError, match=r"content\[2\] is a part of type 'image_url'"):
        conversation_of({"messages": messages})
    messages[0]["content"] = [7]
    with pytest.raises(BadConversationError, match=r"content.0. is 7, and only text can be"):
        conversation_of({"messages": messages})
    for part in ({"type": "text", "body": "a"}, {"body": "a"}):
        messages[0]["content"] = [part]
        with pytest.raises(BadConversationError, match=r"content.0. is .* without the key"):
            conversation_of({"messages": messages})


def test_documents_and_variables_of_the_template_are_read() -> None:
    row = {
        "messages": turn("a", "b"),
        "documents": [{"title": "t", "text": "d"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    found = conversation_of(row)
    assert found.documents == ({"title": "t", "text": "d"},)
    assert found.variables == {"enable_thinking": False}


def test_the_functions_in_a_system_message_are_tools() -> None:
    system = {"role": "system", "content": "s", "tools": [ROOM]}
    found = conversation_of({"messages": [system, *turn("a", "b")]})
    assert found.tools == (TOOL,)
    assert dict(found.messages[0]) == {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": "b", "label": False}, "label = False marks a bad answer"),
        ({"messages": turn("a", "b"), "label": "False"}, "label = 'False' marks a bad answer"),
        ({"messages": turn("a", "b"), "weight": 0}, "weight = 0"),
        ({"messages": turn("a", "b"), "train": False}, "train = False"),
        (
            {"messages": [user("a"), assistant("b", weight=0)]},
            "excludes every message of the assistant",
        ),
    ],
)
def test_a_row_that_its_own_data_excludes_is_left_out(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UntrainedRowError, match=reason):
        conversation_of(row)


def test_a_text_that_is_repeated_in_the_messages_is_not_unread() -> None:
    row = {"messages": turn("a", "b"), "prompt": "a", "solution": "c", "id": 3, "image": None}
    assert unread_columns(row, columns_of(row)) == ["solution", "id"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [user("a"), assistant("b", weight=0.5)]}, "weight = 0.5 is not supported"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call"}]},
            "needs the keys 'from' and 'value'",
        ),
        (
            {"messages": [user("a"), {"from": "function_call", "value": "{}"}]},
            r"messages\[1\] tool_calls\[0\] is .*, a function call without a name",
        ),
        ({"messages": turn("a", "b"), "tools": "add"}, "tools is 'add', not a list of functions"),
        ({"prompt": "a", "completion": "b", "history": [["c"]]}, r"history\[0\] is .* not a pair"),
        (
            {"messages": [{"role": "system", "content": "x"}, *turn("a", "b")], "system": "y"},
            "system is 'y', but the messages begin with the system message",
        ),
    ],
)
def test_a_row_that_would_lose_something_is_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadConversationError, match=problem):
        conversation_of(row)


def test_pairs_have_tools_and_the_formats_of_openai_and_sharegpt() -> None:
    openai = {
        "input": {"messages": [user("a")], "tools": [TOOL]},
        "preferred_output": [assistant("b")],
        "non_preferred_output": [assistant("c")],
    }
    found = preference_of(openai)
    assert (found.prompt, found.chosen, found.rejected) == (
        [user("a")],
        [assistant("b")],
        [assistant("c")],
    )
    assert found.tools == (TOOL,)
    sharegpt = {
        "conversations": [{"from": "human", "value": "a"}],
        "chosen": {"from": "gpt", "value": "b"},
        "rejected": {"from": "gpt", "value": "c"},
    }
    assert preference_of(sharegpt).chosen == [assistant("b")]
    assert preference_of({"question": "a", "chosen": "b", "rejected": "c"}).prompt == [user("a")]


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"chosen": "b", "rejected": "c"}, "chosen and rejected"),
        ({"chosen": [assistant("b")], "rejected": "c"}, "rejected"),
    ],
)
def test_a_text_of_a_pair_without_a_prompt_is_named(row: dict[str, Any], texts: str) -> None:
    with pytest.raises(BadConversationError, match=f"no prompt for the plain text in {texts}\\."):
        preference_of(row)


def test_a_conversation_has_one_flag_a_message() -> None:
    found = conversation_of({"messages": turn("a", "b")})
    assert isinstance(found, Conversation) and found.tools == () and found.variables == {}


@pytest.mark.parametrize("name", ["GPT", "Assistant", "ai", "bing", "bard"])
def test_a_role_in_other_letters_or_of_another_chatbot_is_the_assistant(name: str) -> None:
    row = {"conversations": [{"from": "Human", "value": "a"}, {"from": name, "value": "b"}]}
    assert read(row) == (turn("a", "b"), [False, True])


def test_messages_can_be_json_text_as_in_a_csv_file() -> None:
    assert read({"messages": json.dumps(turn("a", "b"))}) == (turn("a", "b"), [False, True])


@pytest.mark.parametrize("key", ["parameters", "input", "args"])
def test_arguments_have_the_name_of_another_api(key: str) -> None:
    for call in ({"name": "f", key: ARGUMENTS}, {"function": {"name": "f", key: ARGUMENTS}}):
        messages, _ = read({"messages": [user("a"), assistant(None, tool_calls=[call])]})
        assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": ARGUMENTS}


def test_arguments_with_a_repeated_key_stay_as_given() -> None:
    text = '{"room": 1, "room": 2}'
    call = {"function": {"name": "f", "arguments": text}}
    messages, _ = read({"messages": [user("a"), assistant(None, tool_calls=[call])]})
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize("key", ["thinking", "reasoning", "reasoning_content"])
def test_a_thought_in_parts_is_a_text(key: str) -> None:
    messages, _ = read({"messages": [user("a"), assistant("b", **{key: [{"text": "hm"}]})]})
    read_as = "thinking" if key == "thinking" else "reasoning_content"
    assert messages[1] == assistant("b", **{read_as: "hm"})


def test_one_part_of_text_is_the_content() -> None:
    messages = [user("a"), {"role": "assistant", "content": {"type": "text", "text": "b"}}]
    assert read({"messages": messages})[0] == turn("a", "b")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (assistant("b", thinking={"content": "hm"}), "thinking is .* not text"),
        (assistant("b", thinking=True), "thinking is True, not text"),
        (assistant("b", thinking="hm", reasoning_content="no"), "different thoughts in"),
        (assistant("b", reasoning="hm", reasoning_content="no"), "different thoughts in"),
        ({"role": "assistant", "content": {"parts": ["b"]}}, "a part without the key 'text'"),
        (
            {"from": "gpt", "value": "b", "role": "teacher"},
            "has the key 'role' in addition to 'from'",
        ),
        ({"from": "gpt", "value": "b", "content": "c"}, None),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "b", "train": False}]},
            "a part has train = False, which would be ignored",
        ),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "b", "weight": 0}]},
            "a part has weight = 0, which would be ignored",
        ),
        (
            assistant(
                "", tool_calls=[{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}]
            ),
            "has arguments in 'arguments' and 'parameters'",
        ),
    ],
)
def test_a_value_that_would_be_lost_is_refused(message: Any, problem: str | None) -> None:
    row = {"conversations": [{"from": "human", "value": "a"}, message]}
    if problem is None:
        row = {"messages": [user("a"), message]}
        problem = "has the key 'content' in addition to"
    with pytest.raises(BadConversationError, match=problem):
        conversation_of(row)


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (assistant("hm", channel="analysis", weight=0), {}, "has a weight, which"),
        (assistant("hm", channel="analysis", tool_calls=[CALL]), {}, "the key 'tool_calls', which"),
        (assistant("hm", channel="analysis"), {"thinking": "no"}, "has a thought, and follows"),
        (assistant("I look.", channel="commentary"), {}, "without 'recipient'"),
    ],
)
def test_a_harmony_message_is_not_read_in_part(
    first: dict[str, Any], second: dict[str, Any], problem: str
) -> None:
    row = {"messages": [user("a"), first, assistant("b", channel="final", **second)]}
    with pytest.raises(BadConversationError, match=problem):
        conversation_of(row)


def test_two_system_columns_with_different_texts_are_refused() -> None:
    row = {"messages": turn("a", "b"), "system": "s", "system_prompt": "s"}
    assert read(row)[0] == [{"role": "system", "content": "s"}, *turn("a", "b")]
    with pytest.raises(BadConversationError, match="system and system_prompt have different"):
        conversation_of({**row, "system_prompt": "t"})


def test_a_row_of_empty_columns_is_left_out() -> None:
    with pytest.raises(UntrainedRowError, match="every column is empty"):
        conversation_of({"question": "", "answer": ""})
