"""Renders a conversation to the texts that are trained: every turn as the model sees it.

A turn is a trained message of the assistant. At inference a server renders the messages before the
turn with the generation prompt, and the model continues this prompt up to a stop token. So the
trained text of a turn is what the template adds to the prompt when the turn is the last message.
Turns whose prompt and text begin a longer rendered text share one sample. Templates that render
earlier turns in another way, for example without thoughts, need several samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from payload.core.errors import DataError
from payload.data.rows.conversation import Conversation, Message
from payload.data.templates.chat_template import ChatTemplate
from payload.data.templates.control_tokens import Span, mark_in, take_marks, without_marks
from payload.data.templates.lost_keys import leaves, require_rendered
from payload.data.templates.stop_tokens import first_of
from payload.data.templates.thoughts import (
    end_of_empty_thought,
    prompt_tail,
    thought_of,
    without_thoughts,
)
from payload.data.templates.turn_end import Part, TurnEnd, num_common
from payload.formats.data_folder import Thoughts

TrainOn = Literal["all", "last"]

_TOOL_ROLES = ("tool", "function", "ipython", "observation")
_LEAST_COMMON_CHARS = 4
_ESCAPED_MARK = "\\ufdd"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Options that choose the trained tokens of each conversation."""

    thoughts: Thoughts = "keep"
    train_on: TrainOn = "all"
    """`last` trains only the last trained turn."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template; the variables of a row override these."""
    ignored_keys: frozenset[str] = frozenset()
    """Keys of messages, or `tools`, that the template may leave out."""

    def shaping(self) -> tuple[str, ...]:
        """Return the values that the trained text depends on."""
        variables = json.dumps(dict(self.variables), sort_keys=True)
        ignored = json.dumps(sorted(self.ignored_keys))
        return ("turns", self.thoughts, self.train_on, variables, ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedSample:
    """A text to train on."""

    text: str
    spans: list[Span]
    """Ranges of characters that are trained, in order; each ends with a stop token."""
    literal: list[Span] = field(default_factory=list)
    """Ranges of special tokens from the row, which are encoded as text."""
    has_unmarked: bool = False
    """True if special tokens of the row are not in `literal`, as marks change the rendered text."""


@dataclass(slots=True, kw_only=True)
class _Turn:
    text: str
    spans: list[Span]
    through: int
    """End of the stop token: the model sees and writes the text up to here."""


def render_samples(
    template: ChatTemplate,
    conversation: Conversation,
    options: SampleOptions = SampleOptions(),
) -> list[RenderedSample]:
    """Return the texts to train on, with the spans of the trained turns, in their order.

    The spans come from the template's `{% generation %}` blocks. Without blocks, a span is the text
    that an answer adds to its prompt, up to the stop token. Raises DataError for a conversation
    that the template rejects, a key that the template leaves out, and a turn without a stop token.
    """
    return RowRendering(template, conversation, options).samples()


class RowRendering:
    """`render_samples` in two steps: the first request can be sent in a batch with other rows'."""

    def __init__(
        self, template: ChatTemplate, conversation: Conversation, options: SampleOptions
    ) -> None:
        """Raises DataError like `render_samples`."""
        self._conversation = conversation
        self._new_row = partial(_Row, template, options=options)
        try:
            self._row = self._new_row(conversation)
        except _RejectedError:
            self._row = self._with_text_arguments()

    def request(self) -> str:
        """Return the request that `samples` sends first."""
        return self._row.request

    def take(self, answer: list[dict[str, Any]] | None) -> None:
        """Take the worker's answer to `request`; without an answer, `samples` sends the request."""
        self._row.answer = answer

    def samples(self) -> list[RenderedSample]:
        """Return the result of `render_samples`. Raises DataError."""
        try:
            whole, turns = self._row.turns()
        except _RejectedError:
            self._row = self._with_text_arguments()
            whole, turns = self._row.turns()
        return _samples(whole, turns, has_unmarked=self._row.has_unmarked)

    def _with_text_arguments(self) -> _Row:
        """Return the row with the arguments of calls as JSON text, which some templates require.

        Called while a _RejectedError is handled; raises this error for a row without such calls.
        """
        changed = _with_text_arguments(self._conversation)
        if changed is None:
            raise
        self._conversation = changed
        return self._new_row(changed)


def _samples(whole: str, turns: list[_Turn], *, has_unmarked: bool) -> list[RenderedSample]:
    """Return one sample for turns that begin the same text."""
    texts: list[tuple[str, list[Span]]] = []
    for turn in reversed(turns):
        if not texts and whole.startswith(turn.text[: turn.through]):
            texts.append((whole, []))
        for text, spans in texts:
            if text.startswith(turn.text[: turn.through]):
                same = num_common(text, turn.text)
                spans[:0] = [
                    (start, end if end <= same else turn.through)
                    for start, end in turn.spans
                    if end <= same or start < turn.through
                ]
                break
        else:
            texts.append((turn.text, list(turn.spans)))
    if not turns:
        texts = [(whole, [])]
    samples = []
    for text, spans in reversed(texts):
        plain, ranges, literal = take_marks(text, spans)
        samples.append(
            RenderedSample(text=plain, spans=ranges, literal=literal, has_unmarked=has_unmarked)
        )
    return samples


def _overlap(ending: str, text: str, start: int) -> int:
    """Return the length of the longest end of `ending` with which `text` continues at `start`.

    A short end counts as chance and gives 0, unless it is white space.
    """
    for index in range(len(ending)):
        common = ending[index:]
        if len(common) < _LEAST_COMMON_CHARS and not common.isspace():
            break
        if text.startswith(common, start):
            return len(common)
    return 0


def _white_end(text: str) -> str:
    """Return the white space at the end of a text."""
    return text[len(text.rstrip()) :]


class _RejectedError(DataError):
    """The template rejects the conversation."""


def _with_text_arguments(conversation: Conversation) -> Conversation | None:
    """Return the conversation with the arguments of calls as JSON text; None without such calls."""
    messages: list[Message] = []
    for message in conversation.messages:
        calls = [dict(each) for each in message.get("tool_calls") or ()]
        for call in calls:
            function = call.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
                text = json.dumps(function["arguments"], ensure_ascii=False)
                call["function"] = {**function, "arguments": text}
        messages.append({**message, "tool_calls": calls} if calls else message)
    if messages == list(conversation.messages):
        return None
    return replace(conversation, messages=tuple(messages))


class _Row:
    """One conversation with its template."""

    def __init__(
        self, template: ChatTemplate, conversation: Conversation, options: SampleOptions
    ) -> None:
        self._template, self._options = template, options
        messages = list(conversation.messages)
        if options.thoughts == "drop":
            messages = [
                without_thoughts(each) if each["role"] == "assistant" else each for each in messages
            ]
        self._messages: list[Message] = messages
        self._tools: Any = list(conversation.tools) or None
        self._documents: Any = list(conversation.documents) or None
        self._variables = {**options.variables, **conversation.variables}
        self._ends = template.turn_ends(self._variables)
        numbers = [number for number, trained in enumerate(conversation.trained) if trained]
        self._numbers = numbers[-1:] if options.train_on == "last" else numbers
        self.has_unmarked = False
        self._thoughts: dict[int, str | None] = {}
        self._end_of: dict[int, TurnEnd | None] = {}
        is_marked = template.process.is_marked
        self._first_parts = (
            [(len(self._messages), False)] if is_marked else self._first_added_parts()
        )
        self.request = self._first_request()
        """Request for the parts that `turns` renders first."""
        self.answer: list[dict[str, Any]] | None = None
        """The worker's answer to `request`, if it was sent in a batch."""
        self._mark_special_tokens()

    def _first_request(self) -> str:
        is_marked = self._template.process.is_marked
        return self._template.request(
            self._messages,
            self._first_parts,
            tools=self._tools,
            documents=self._documents,
            variables=self._variables,
            with_blocks=is_marked,
        )

    def _mark_special_tokens(self) -> None:
        """Mark the row's special tokens, unless the marks change the rendered text.

        Raises DataError for a row with a mark, which would change what is a special token.
        """
        # The request is ASCII, so a mark is escaped there; few rows need the slower search.
        if _ESCAPED_MARK in self.request:
            mark = mark_in([self._messages, self._tools, self._documents, self._variables])
            if mark is not None:
                raise DataError(f"a text has the noncharacter U+{ord(mark):04X}. Remove it.")
        control = self._template.control_tokens()
        if not control.may_be_in(self.request):
            return
        given = [each for each in self._messages if each["role"] != "assistant"]
        if not control.is_in([given, self._tools, self._documents]):
            return
        (plain,) = self._render([(len(self._messages), False)])
        before = self._messages, self._tools, self._documents
        self._messages = control.mark_messages(self._messages)
        self._tools, self._documents = control.mark(self._tools), control.mark(self._documents)
        try:
            (marked,) = self._render([(len(self._messages), False)])
            is_same = without_marks(marked[0]) == plain[0]
        except DataError:
            is_same = False
        if not is_same:
            self.has_unmarked = True
            self._messages, self._tools, self._documents = before
        else:
            self.request = self._first_request()

    def _render(
        self, parts: Sequence[Part], *, with_blocks: bool = False
    ) -> list[tuple[str, list[Span]]]:
        found, self.answer = self.answer, None
        if found is not None:
            self._template.process.note_success()
        else:
            found = self._template.parts(
                self._messages,
                parts,
                tools=self._tools,
                documents=self._documents,
                variables=self._variables,
                with_blocks=with_blocks,
            )
        texts = []
        for (count, _), each in zip(parts, found, strict=True):
            if "error" in each:
                # A conversation that begins with an answer has an empty prompt.
                if count:
                    raise _RejectedError(str(self._template.error(each["error"])))
                each = {"text": "", "blocks": []}
            texts.append((each["text"], [(start, end) for start, end in each.get("blocks", ())]))
        return texts

    def turns(self) -> tuple[str, list[_Turn]]:
        """Return the whole text, and the trained turns in order."""
        return self._marked_turns() if self._template.process.is_marked else self._added_turns()

    def _added_turns(self) -> tuple[str, list[_Turn]]:
        """Return the whole text, and the turns of a template without blocks."""
        size = len(self._messages)
        parts = self._first_parts
        texts = {part: text for part, (text, _) in zip(parts, self._render(parts), strict=True)}
        whole = texts[size, False]
        turns = []
        for number in self._numbers:
            prompt, answered = texts[number, True], texts.get((number + 1, False), whole)
            text, start = self._located(number, prompt, answered)
            if number + 1 < size and answered is whole and not self._follows(number, text, start):
                # The template changed the content, and a later message may quote it.
                ((answered, _),) = self._render([(number + 1, False)])
                text, start = self._located(number, prompt, answered)
            text, end = self._ended(text, start, number)
            self._require_rendered(number, text[:end], start)
            turns.append(_Turn(text=text, spans=[(start, end)], through=end))
        return whole, turns

    def _first_added_parts(self) -> list[Part]:
        size = len(self._messages)
        parts: list[Part] = [(size, False)]
        for number in self._numbers:
            parts.append((number, True))
            if number + 1 < size and not self._is_in_whole(number):
                parts.append((number + 1, False))
        return parts

    def _is_in_whole(self, number: int) -> bool:
        """Return True if a turn probably is a part of the whole text, up to its stop token."""
        end = self._ends.get("user")
        if not self._template.process.is_sequential or end is None or not end.is_same:
            return False
        message = self._messages[number]
        content = message.get("content")
        if message.get("tool_calls") or not isinstance(content, str) or not content.strip():
            return False
        return self._thought(number) is None and first_of(end.stops, content) is None

    def _follows(self, number: int, text: str, start: int) -> bool:
        """Return True if the text continues at `start` with the unchanged content of a message."""
        return text[start:].lstrip().startswith(str(self._messages[number]["content"]).strip())

    def _marked_turns(self) -> tuple[str, list[_Turn]]:
        """Return the whole text, and the turns of a template with `{% generation %}` blocks.

        The whole block is trained, because the template's author chose its limits.
        """
        size = len(self._messages)
        ((whole, blocks),) = self._render([(size, False)], with_blocks=True)
        answers = [n for n, each in enumerate(self._messages) if each["role"] == "assistant"]
        turns = []
        if self._template.process.is_sequential and len(blocks) == len(answers):
            by_number = dict(zip(answers, blocks, strict=True))
            for number in self._numbers:
                turns.append(self._marked_turn(number, whole, [by_number[number]]))
            return whole, turns
        for number in self._numbers:
            parts: list[Part] = [(number, False), (number + 1, False)]
            (_, before), (text, found) = self._render(parts, with_blocks=True)
            turns.append(self._marked_turn(number, text, found[len(before) :]))
        return whole, turns

    def _marked_turn(self, number: int, text: str, blocks: list[Span]) -> _Turn:
        blocks = [(start, end) for start, end in blocks if end > start]
        if not blocks:
            raise self._error(
                number, "the message is in no {% generation %} block, so it is not trained."
            )
        (start, _), (begin, last) = blocks[0], blocks[-1]
        self._require_rendered(number, text[:last], start)
        found, end = self._ended(text, start, number)
        if end > last:
            # The stop token belongs to the turn, although it is behind the block.
            if found == text and text[last:end].strip() not in self._stops(number):
                raise self._no_stop(number)
            blocks = [*blocks[:-1], (begin, end)]
        return _Turn(text=found, spans=blocks, through=end)

    def _located(self, number: int, prompt: str, answered: str) -> tuple[str, int]:
        """Return the text of a turn with its prompt, and where the trained part begins.

        `answered` is the text with the turn as the last message. The text of a turn can begin
        before the end of its prompt, if the prompt ends with marks of thoughts.
        """
        tail, end = prompt_tail(prompt), self._end(number)
        has_thought = self._thought(number) is not None
        head = prompt.removesuffix(tail.text if tail else end.prompt_only if end else "")
        if answered.startswith(prompt):
            start = len(prompt)
        elif answered.startswith(head):
            is_continued = has_thought and tail is not None and tail.closing is not None
            start = num_common(prompt, answered) if is_continued else len(head)
            if tail is None and end is not None:
                start += _overlap(end.prompt_only, answered, start)
        else:
            start = self._behind(head, number, answered)
        if tail is None or has_thought:
            return answered, start
        after = end_of_empty_thought(answered, start)
        if tail.closing is None and after > start:
            # The model writes the white space after the marks that the prompt lacks.
            after = start + len(answered[start:after].rstrip())
            after += _overlap(_white_end(prompt), answered, after)
        if tail.closing is None or self._options.thoughts in ("keep", "drop"):
            return answered, after
        if self._options.thoughts == "refuse":
            raise self._error(
                number,
                f"the prompt opens a block of thoughts ({tail.text.strip()}), and the message "
                "lacks one. Add reasoning_content, or train the end of the block with "
                "--thoughts empty.",
            )
        if after > start == len(prompt):
            return answered, start
        closing = answered.find(tail.closing, start, after)
        line = "\n" if prompt.endswith("\n") else ""
        rest = f"{tail.closing}\n\n{answered[after:]}" if closing < 0 else answered[closing:]
        return prompt + line + rest, len(prompt)

    def _behind(self, head: str, number: int, answered: str) -> int:
        """Return where the prompt ends in a text that renders earlier messages in another way.

        This is the index after the longest end of `head` that occurs in the text before the answer.
        The white space at the end of `head` may differ in the text.
        """
        space = _white_end(head)
        head = head.removesuffix(space)
        message = self._messages[number]
        names = [each.get("function", each).get("name") for each in message.get("tool_calls") or ()]
        values = [message.get("content"), self._thought(number), *names]
        places = [answered.rfind(each.strip()) for each in values if isinstance(each, str)]
        limit = min((each for each in places if each >= 0), default=len(answered))
        same = num_common(head, answered)
        low, high = 0, len(head)
        found = -1
        while low < high:
            size = (low + high + 1) // 2
            place = answered.rfind(head[-size:], 0, limit)
            if place >= 0 and place + size > same:
                low, found = size, place + size
            else:
                high = size - 1
        if found < 0:
            return min(same, limit)
        return found + _overlap(space, answered, found)

    def _ended(self, text: str, start: int, number: int) -> tuple[str, int]:
        """Return the text of a turn, with a stop token, and the index after this token."""
        if (found := self._stop_in(text, start, number)) is not None:
            return text, found
        end = self._end(number)
        if end is None or not end.stops:
            raise self._no_stop(number)
        size = len(self._messages)
        if number + 1 < size:
            # The stop token comes with the next message.
            ((after, _),) = self._render([(number + 2, False)])
            # That message can drop a thought of this turn; then only the stop token is the same.
            is_same = after.startswith(text[: self._end_of_values(text, start, number)])
            if is_same and (found := self._stop_in(after, start, number)) is not None:
                return after[:found], found
        same = num_common(end.last, end.next)
        if not text.endswith(end.last[same:]):
            raise self._no_stop(number)
        text = text.removesuffix(end.last[same:]) + end.next[same:]
        return text, len(text)

    def _stop_in(self, text: str, start: int, number: int) -> int | None:
        """Return the end of the turn's stop token, or None if another turn begins before it."""
        behind = self._end_of_values(text, start, number)
        found = first_of(self._stops(number), text, behind)
        end = self._end(number)
        if found is None or (end and end.opener and end.opener in text[behind : found[0]]):
            return None
        return found[1]

    def _end_of_values(self, text: str, start: int, number: int) -> int:
        """Return where the values of a message end in its text, or a place before that.

        A value can have a stop token itself.
        """
        message = self._messages[number]
        ends = [start]
        for value in (self._thought(number), message.get("content"), message.get("tool_calls")):
            if not value:
                continue
            place = start
            for leaf in (value,) if isinstance(value, str) else leaves(value):
                # Many data sets have the stop token at the end of the content.
                short = leaf.strip()
                for stop in self._stops(number):
                    short = short.removesuffix(stop)
                found = text.find(short, place)
                place = found + len(short) if found >= 0 else place
            ends.append(place)
        return max(ends)

    def _thought(self, number: int) -> str | None:
        """Return the thought of a message of the assistant."""
        if number not in self._thoughts:
            self._thoughts[number] = thought_of(self._messages[number])
        return self._thoughts[number]

    def _end(self, number: int) -> TurnEnd | None:
        if number not in self._end_of:
            self._end_of[number] = self._find_end(number)
        return self._end_of[number]

    def _find_end(self, number: int) -> TurnEnd | None:
        following = self._messages[number + 1 : number + 2]
        is_tool = (
            following[0]["role"] in _TOOL_ROLES
            if following
            else bool(self._messages[number].get("tool_calls"))
        )
        return self._ends.get("tool" if is_tool else "user") or self._ends.get("user")

    def _stops(self, number: int) -> tuple[str, ...]:
        end = self._end(number)
        return (end and end.stops) or self._template.known_tokens().stops

    def _require_rendered(self, number: int, text: str, start: int) -> None:
        require_rendered(
            self._messages,
            number,
            without_marks(text),
            start=len(without_marks(text[:start])),
            tools=self._tools,
            ignored=self._options.ignored_keys,
            where=self._template.where,
            render=self._probe,
        )

    def _probe(self, messages: Sequence[Message], tools: Any) -> str | None:
        """Return the text of changed messages, or None if the template rejects them."""
        (found,) = self._template.parts(
            messages,
            [(len(messages), False)],
            tools=tools,
            documents=self._documents,
            variables=self._variables,
        )
        text: str | None = found.get("text")
        return None if text is None else without_marks(text)

    def _error(self, number: int, reason: str) -> DataError:
        count = len(self._messages)
        return DataError(f"{self._template.where}: message {number + 1} of {count}: {reason}")

    def _no_stop(self, number: int) -> DataError:
        return self._error(
            number,
            "no stop token follows the message, so the model would not learn to stop. Add "
            "{{ eos_token }} after the assistant's text in the template, and pass the file with "
            "--chat-template.",
        )
