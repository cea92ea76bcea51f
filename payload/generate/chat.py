"""A conversation with a model in the terminal, by its own chat template."""

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
    """Messages so far. What the model has read stays in its cache from one turn to the next."""

    model: CausalLM
    codec: Codec
    template: ChatTemplate
    options: SamplingOptions
    """`max_new_tokens` is the longest answer; `num_samples` is 1."""
    stops: Sequence[str] = ()
    """Texts that end an answer, besides the model's own tokens."""
    messages: list[dict[str, str]] = field(default_factory=list)
    num_forgotten: int = 0
    """Messages that no longer fit the model's context and are not shown to it."""
    num_tokens: int = 0
    """Number of tokens of the last answer."""
    _reader: Reader | None = None

    def answer(self, question: str) -> Generator[str, None, None]:
        """Yield the answer to a new message in pieces.

        The messages have what was yielded, also when the caller goes no further. Raises ConfigError
        when the message is too long for the model's context.
        """
        self.messages.append({"role": "user", "content": question})
        prompt = self._prompt()
        given: list[str] = []
        try:
            for piece in self._pieces(prompt):
                given.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(given).strip()})

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
        """Return the conversation's tokens, without its oldest turns where they do not fit."""
        context = self.model.spec.context()
        room = context - min(self.options.max_new_tokens, context // 2)
        system = 1 if self.messages[0]["role"] == "system" else 0
        self.num_forgotten = 0
        while True:
            kept = self.messages[:system] + self.messages[system + self.num_forgotten :]
            text = self.template.render(kept, add_generation_prompt=True)
            tokens = self.codec.encode_marked(text)
            if len(tokens) <= room:
                return tokens
            if len(kept) <= system + 1:
                self.messages.pop()
                raise ConfigError(
                    f"the message has {len(tokens)} tokens with its template, the model's context "
                    f"has room for {room} beside the answer. Shorten it, or lower --max-new-tokens."
                )
            # A question goes with its answer: templates want them in turn.
            self.num_forgotten += 2


def talk(
    conversation: Conversation,
    *,
    read: Callable[[], str],
    show: Callable[[str], None],
    end: Callable[[], None],
    note: Callable[[str], None],
) -> None:
    """Answer what `read` returns, until it raises EOFError.

    `show` gets an answer's pieces; `end` is called when it has them all. An interrupt ends the
    answer under way and not the conversation; while nothing is answered it is passed on.
    """
    while True:
        try:
            question = read().strip()
        except EOFError:
            return
        if not question:
            continue
        forgotten = conversation.num_forgotten
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
        if conversation.num_forgotten > forgotten:
            note(f"(the oldest {conversation.num_forgotten} messages no longer fit the context)")
