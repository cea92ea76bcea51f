"""Divides the text from a chat model into thoughts, an answer and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from payload.core.errors import ConfigError, DataError
from payload.data.rows.conversation import Message
from payload.data.rows.messages import ASSISTANT
from payload.data.templates.chat_template import ChatTemplate
from payload.generate.call_formats import ToolCall
from payload.generate.codec import Codec
from payload.generate.thoughts import Thoughts, learn_thoughts
from payload.generate.tool_calls import ToolCallFormat, learn_tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A generated answer, complete or still growing."""

    thoughts: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()

    def as_row(self) -> dict[str, Any]:
        """Return the answer for JSON. Keys without a value are left out, except `text`."""
        row: dict[str, Any] = {"text": self.text}
        if self.thoughts:
            row["thoughts"] = self.thoughts
        if self.calls:
            row["tool_calls"] = [call.as_row() for call in self.calls]
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """A conversation's chat template, tools and variables, and the format of the answers."""

    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    thoughts: Thoughts
    calls: ToolCallFormat | None
    special_texts: Sequence[str]
    """Texts of the tokenizer's special tokens, which are removed from answers."""
    stop_tokens: frozenset[int]
    """The model's stop tokens, and the tokens with which the template ends a turn."""

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the conversation as text, up to the position at which the answer begins.

        If the conversation ends with a message of the assistant, the model continues this message,
        as with `continue_final_message` of transformers. Raises DataError.
        """
        continues = messages[-1]["role"] == ASSISTANT
        text = self.template.render(
            messages,
            add_generation_prompt=not continues,
            tools=self.tools,
            variables=self.variables,
        )
        return self._up_to_the_end_of(messages[-1], text) if continues else text

    def _up_to_the_end_of(self, message: Message, text: str) -> str:
        """Return the rendered text up to the end of its last message. Raises DataError."""
        content = message.get("content")
        start = text.rfind(content.strip()) if isinstance(content, str) and content.strip() else -1
        if start < 0:
            raise DataError(
                f"{self.template.where}: renders no text of the last message, so the model cannot "
                "continue this message. End with a message of the user."
            )
        assert isinstance(content, str)
        # A template may strip the message.
        whole, stripped = content.lstrip(), content.strip()
        return text[: start + len(whole if text.startswith(whole, start) else stripped)]

    def divide(self, generated: str, *, prompt: str, is_finished: bool) -> Answer:
        """Return the parts of a generated text that follows a prompt.

        If the text is unfinished, trailing characters that may belong to a delimiter or a call are
        left out. So each part of the answer only grows, and its beginning never changes.
        """
        thoughts, text = self.thoughts.divide(
            generated, is_open=self.thoughts.is_opened_by(prompt), is_finished=is_finished
        )
        calls: tuple[ToolCall, ...] = ()
        if self.calls is not None:
            if is_finished:
                text, calls = self.calls.divide(text)
            else:
                text = text[: self.calls.begin(text)].rstrip()
        return Answer(thoughts=self._plain(thoughts), text=self._plain(text).strip(), calls=calls)

    def message(self, answer: Answer) -> Message:
        """Return the assistant's message, for the next turn of the conversation."""
        if self.calls is None or not answer.calls:
            message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        else:
            message = dict(self.calls.message(answer.text, answer.calls))
        if answer.thoughts and self.thoughts.key is not None:
            message[self.thoughts.key] = answer.thoughts
        return message

    def _plain(self, text: str) -> str:
        for special in self.special_texts:
            text = text.replace(special, "")
        return text


def chat_format(
    template: ChatTemplate,
    codec: Codec,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> ChatFormat:
    """Return the format of a conversation.

    Raises ConfigError if the template does not write the tools, or rejects a user's message.
    """
    variables = variables or {}
    calls = None
    try:
        thoughts = learn_thoughts(template, variables)
        if tools:
            _require_tools(template, tools, variables)
            calls = learn_tool_calls(template, tools, variables)
    except DataError as error:
        raise ConfigError(str(error)) from None
    return ChatFormat(
        template=template,
        tools=tools,
        variables=variables,
        thoughts=thoughts,
        calls=calls,
        special_texts=codec.special_texts,
        stop_tokens=codec.stop_tokens | _stop_tokens(template, codec, variables),
    )


def _stop_tokens(
    template: ChatTemplate, codec: Codec, variables: Mapping[str, Any]
) -> frozenset[int]:
    """Return the tokens at which an answer ends. They are the same as in training."""
    texts = {*template.known_tokens().stops}
    texts.update(*(end.stops for end in template.turn_ends(variables).values()))
    encoded = [codec.encode_marked(text) for text in texts if text]
    return frozenset(tokens[0] for tokens in encoded if len(tokens) == 1)


def _require_tools(
    template: ChatTemplate, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> None:
    """Raise ConfigError if the model would not see the tools."""
    messages = [{"role": "user", "content": "probe"}]
    texts = [
        template.render(messages, add_generation_prompt=True, tools=given, variables=variables)
        for given in ((), tools)
    ]
    if texts[0] == texts[1]:
        raise ConfigError(
            f"--tools: {template.where} does not write tools into the prompt, so the model cannot "
            "call them. Use a model whose chat template has tools, or leave --tools out."
        )
