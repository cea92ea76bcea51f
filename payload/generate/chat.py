"""Chats with a model in the terminal, using the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from payload.core.errors import ConfigError
from payload.data.templates.chat_template import ChatTemplate
from payload.generate.codec import Codec
from payload.generate.detokenizer import StopText, TextStream
from payload.generate.sampling import Reader, Sampler, SamplingOptions
from payload.train.models.base import CausalLM


@dataclass(kw_only=True)
class Conversation:
    """A chat that keeps the key-value cache from one turn to the next."""

    model: CausalLM
    codec: Codec
    template: ChatTemplate
    options: SamplingOptions
    """Sampling options; `max_new_tokens` limits an answer, and `num_samples` is 1."""
    stops: Sequence[str] = ()
    """Texts that end an answer, in addition to the model's stop tokens."""
    messages: list[dict[str, str]] = field(default_factory=list)
    num_dropped: int = 0
    """Number of messages that no longer fit into the model's context and are left out."""
    num_tokens: int = 0
    """Number of tokens in the last answer."""
    _reader: Reader | None = None

    def answer(self, question: str) -> Generator[str, None, None]:
        """Yield the answer to a new message in pieces.

        If the caller stops early, the messages hold the text yielded so far. Raises ConfigError if
        the message is too long for the model's context.
        """
        self.messages.append({"role": "user", "content": question})
        prompt = self._prompt()
        pieces: list[str] = []
        try:
            for piece in self._pieces(prompt):
                pieces.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces).strip()})

    def _pieces(self, prompt: list[int]) -> Iterator[str]:
        self._reader = self._reader or Reader(self.model)
        sampler = Sampler(
            self.model,
            [prompt],
            options=self.options,
            stop_tokens=self.codec.stop_tokens,
            num_tokens=min(self.codec.vocab_size, self.model.spec.vocab_size),
            reader=self._reader,
        )
        text, stop = TextStream(self.codec.decode, prompt=()), StopText(self.stops)
        self.num_tokens = 0
        for (token,) in sampler.tokens():
            assert token is not None, "one row with one prompt is always drawn"
            self.num_tokens += 1
            if piece := stop.add(text.add(token)):
                yield piece
            if stop.found:
                return
        if rest := stop.add(text.finish()) + stop.finish():
            yield rest

    def _prompt(self) -> list[int]:
        """Return the tokens of the conversation, without the oldest turns if they do not fit."""
        context = self.model.spec.context()
        room = context - min(self.options.max_new_tokens, context // 2)
        system = 1 if self.messages[0]["role"] == "system" else 0
        self.num_dropped = 0
        while True:
            kept = self.messages[:system] + self.messages[system + self.num_dropped :]
            text = self.template.render(kept, add_generation_prompt=True)
            tokens = self.codec.encode_marked(text)
            if len(tokens) <= room:
                return tokens
            if len(kept) <= system + 1:
                self.messages.pop()
                raise ConfigError(
                    f"the message has {len(tokens)} tokens with its template, but the model's "
                    f"context has room for {room} next to the answer. Shorten it, or lower "
                    "--max-new-tokens."
                )
            # Drop a question with its answer: templates require alternating roles.
            self.num_dropped += 2


def run_chat(
    conversation: Conversation,
    *,
    read: Callable[[], str],
    show: Callable[[str], None],
    end: Callable[[], None],
    note: Callable[[str], None],
) -> None:
    """Answer the messages that `read` returns, until it raises EOFError.

    `show` receives the pieces of an answer, and `end` is called after the last. An interrupt ends
    only the current answer; if no answer is in progress, KeyboardInterrupt is raised.
    """
    while True:
        try:
            question = read().strip()
        except EOFError:
            return
        if not question:
            continue
        dropped = conversation.num_dropped
        answer = conversation.answer(question)
        try:
            for piece in answer:
                show(piece)
        except KeyboardInterrupt:
            answer.close()
            note("(interrupted)")
        except ConfigError as error:
            note(str(error))
            continue
        end()
        if conversation.num_dropped > dropped:
            note(f"(the oldest {conversation.num_dropped} messages no longer fit into the context)")
