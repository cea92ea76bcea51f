"""Chats with a model in the terminal, using the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from payload.core.errors import ConfigError
from payload.data.rows.conversation import Message
from payload.generate.answers import Answer, ChatFormat
from payload.generate.call_formats import ToolCall
from payload.generate.codec import Codec
from payload.generate.detokenizer import StopText, TextStream
from payload.generate.sampling import Reader, Sampler, SamplingOptions
from payload.train.models.base import CausalLM

HELP_COMMAND = "/help"


@dataclass(kw_only=True)
class Conversation:
    """A chat that keeps the key-value cache from one turn to the next."""

    model: CausalLM
    codec: Codec
    format: ChatFormat
    options: SamplingOptions
    """Sampling options. `max_new_tokens` is the limit for an answer, and `num_samples` is 1."""
    stops: Sequence[str] = ()
    """Texts that end an answer, in addition to the model's stop tokens."""
    messages: list[Message] = field(default_factory=list)
    num_dropped: int = 0
    """Number of messages that are left out because they no longer fit into the model's context."""
    num_tokens: int = 0
    """Number of tokens in the last answer."""
    last: Answer = field(default_factory=Answer)
    """The last answer."""
    _reader: Reader | None = None

    def answer(self, *messages: Message) -> Generator[Answer, None, None]:
        """Yield the growing answer to new messages: a question, or the results of tool calls.

        Each yielded value is the whole answer so far. If the caller stops early, the conversation
        keeps the last yielded value. Raises ConfigError if the messages are too long for the
        model's context.
        """
        self.messages += messages
        prompt = self._prompt(len(messages))
        self.last = Answer()
        text = ""
        try:
            for text in self._texts(self.codec.encode_marked(prompt)):
                self.last = self.format.divide(text, prompt=prompt, is_finished=False)
                yield self.last
        finally:
            self.last = self.format.divide(text, prompt=prompt, is_finished=True)
            self.messages.append(self.format.message(self.last))
        yield self.last

    def _texts(self, prompt: list[int]) -> Iterator[str]:
        """Yield the generated text so far, including special tokens, after each token."""
        self._reader = self._reader or Reader(self.model)
        sampler = Sampler(
            self.model,
            [prompt],
            options=self.options,
            stop_tokens=self.format.stop_tokens,
            num_tokens=min(self.codec.vocab_size, self.model.spec.vocab_size),
            reader=self._reader,
        )
        stream, stop = TextStream(self.codec.decode_marked, prompt=()), StopText(self.stops)
        self.num_tokens, text = 0, ""
        for (token,) in sampler.tokens():
            assert token is not None, "the sampler returned no token for its only prompt"
            self.num_tokens += 1
            text += stop.add(stream.add(token))
            yield text
            if stop.found:
                return
        yield text + stop.add(stream.finish()) + stop.finish()

    def _prompt(self, num_new: int) -> str:
        """Return the rendered conversation. The oldest turns are left out if they do not fit.

        If the last `num_new` messages alone do not fit, these messages are removed again.
        """
        context = self.model.spec.context()
        room = context - min(self.options.max_new_tokens, context // 2)
        system = 1 if self.messages[0]["role"] == "system" else 0
        self.num_dropped = 0
        while True:
            kept = self.messages[:system] + self.messages[system + self.num_dropped :]
            prompt = self.format.prompt(kept)
            size = len(self.codec.encode_marked(prompt))
            if size <= room:
                return prompt
            turns = [
                number
                for number, message in enumerate(kept[system:])
                if number and message["role"] == "user"
            ]
            if not turns:
                del self.messages[len(self.messages) - num_new :]
                raise ConfigError(
                    f"the message has {size} tokens with its template, but the model's "
                    f"context has room for {room} next to the answer. Shorten the message, "
                    "or lower --max-new-tokens."
                )
            # Drop a question with everything up to the next one: templates require alternating
            # roles, and results of calls must follow their calls.
            self.num_dropped += turns[0]


def run_chat(
    conversation: Conversation,
    *,
    read: Callable[[], str],
    read_result: Callable[[ToolCall], str] | None,
    show: Callable[[Answer], None],
    end: Callable[[str], None],
    note: Callable[[str], None],
    show_help: Callable[[], None] | None = None,
) -> None:
    """Answer the messages that `read` returns, until it raises EOFError.

    `show` receives the growing answer. After each answer, `end` is called with the question.
    `show_help` is called for an empty line and for `/help`. `read_result` returns the result of a
    call. Without `read_result`, calls receive no result. An interrupt ends only the current answer.
    If no answer is in progress, KeyboardInterrupt is raised.
    """
    while True:
        try:
            question = read().strip()
        except EOFError:
            return
        if not question or (show_help and question == HELP_COMMAND):
            if show_help:
                show_help()
            continue
        messages: list[Message] = [{"role": "user", "content": question}]
        while messages:
            dropped = conversation.num_dropped
            answer = conversation.answer(*messages)
            try:
                for part in answer:
                    show(part)
            except KeyboardInterrupt:
                answer.close()
                note("(interrupted)")
            except ConfigError as error:
                note(str(error))
                break
            end(question)
            if conversation.num_dropped > dropped:
                note(
                    f"(the oldest {conversation.num_dropped} messages no longer fit into the "
                    "context)"
                )
            messages = _results(conversation.last.calls, read_result)


def _results(
    calls: Sequence[ToolCall], read_result: Callable[[ToolCall], str] | None
) -> list[Message]:
    """Return a message for the result of every call; empty if the user gives no results."""
    if read_result is None:
        return []
    results: list[Message] = []
    for number, call in enumerate(calls):
        try:
            text = read_result(call).strip()
        except EOFError:
            return []
        if text:
            entry = call.as_entry(number, as_text=False)
            results.append(
                {"role": "tool", "name": call.name, "tool_call_id": entry["id"], "content": text}
            )
    return results if len(results) == len(calls) else []


def shown_call(call: ToolCall) -> str:
    """Return a call for the terminal, as in `get_weather({"city": "Paris"})`."""
    return f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
