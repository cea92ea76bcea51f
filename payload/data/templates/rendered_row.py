"""One conversation and its template: the requests to the template process, and its answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from payload.core.errors import DataError
from payload.core.printable_text import one_line
from payload.data.rows.conversation import Conversation, Message
from payload.data.templates.chat_template import ChatTemplate
from payload.data.templates.control_tokens import Span, mark_in, without_marks
from payload.data.templates.stop_tokens import first_of
from payload.data.templates.template_files import TOOLS_FIX
from payload.data.templates.thoughts import thought_of, without_thoughts
from payload.data.templates.turn_end import Part, TurnEnd
from payload.formats.data_folder import Thoughts

TrainOn = Literal["all", "last"]

_TOOL_ROLES = ("tool", "function", "ipython", "observation")
_ESCAPED_MARK = "\\ufdd"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Options that choose the trained tokens of each conversation."""

    thoughts: Thoughts = "keep"
    train_on: TrainOn = "all"
    """`last` trains only the last of the turns that would be trained."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template; the variables of a row override these."""
    ignored_keys: frozenset[str] = frozenset()
    """Keys that the template may leave out: keys of messages, or `tools`."""

    def shaping(self) -> tuple[str, ...]:
        """Return the values that affect which text the model is trained on."""
        variables = json.dumps(dict(self.variables), sort_keys=True)
        ignored = json.dumps(sorted(self.ignored_keys))
        return ("turns", self.thoughts, self.train_on, variables, ignored)


class RejectedError(DataError):
    """The template rejects the conversation."""


class RenderedRow:
    """One conversation, and the template that renders it."""

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
        """Request for the parts of the conversation that are rendered first."""
        self.answer: list[dict[str, Any]] | None = None
        """The answer of the template process to `request`, if the request was sent in a batch."""
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
        """Mark the row's special tokens, if the marks do not change the rendered text.

        Raises DataError if a text of the row already contains a mark.
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
                    raise self._rejection(each["error"])
                each = {"text": "", "blocks": []}
            texts.append((each["text"], [(start, end) for start, end in each.get("blocks", ())]))
        return texts

    def _first_added_parts(self) -> list[Part]:
        size = len(self._messages)
        parts: list[Part] = [(size, False)]
        for number in self._numbers:
            parts.append((number, True))
            if number + 1 < size and not self._is_in_whole(number):
                parts.append((number + 1, False))
        return parts

    def _is_in_whole(self, number: int) -> bool:
        """Return True if the whole rendered text probably contains the turn and its stop token."""
        end = self._ends.get("user")
        if not self._template.process.is_sequential or end is None or not end.is_same:
            return False
        message = self._messages[number]
        content = message.get("content")
        if message.get("tool_calls") or not isinstance(content, str) or not content.strip():
            return False
        return self._thought(number) is None and first_of(end.stops, content) is None

    def _thought(self, number: int) -> str | None:
        """Return the thought in one of the assistant's messages."""
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

    def _probe(self, messages: Sequence[Message], tools: Any) -> str | None:
        """Render changed messages. Return their text, or None if the template rejects them."""
        (found,) = self._template.parts(
            messages,
            [(len(messages), False)],
            tools=tools,
            documents=self._documents,
            variables=self._variables,
        )
        text: str | None = found.get("text")
        return None if text is None else without_marks(text)

    def _rejection(self, reason: str) -> RejectedError:
        """Return the error for a row that the template rejects.

        If the template leaves out the row's tool calls, the error names this cause.
        """
        number = next((n for n, each in enumerate(self._messages) if each.get("tool_calls")), None)
        if number is None or not self._template.leaves_out_calls():
            return RejectedError(str(self._template.error(reason)))
        return RejectedError(
            str(
                self._error(
                    number,
                    "the template leaves out the key 'tool_calls', and rejects the row "
                    f"({one_line(reason).rstrip('.')}). {TOOLS_FIX}",
                )
            )
        )

    def _error(self, number: int, reason: str) -> DataError:
        count = len(self._messages)
        return DataError(f"{self._template.where}: message {number + 1} of {count}: {reason}")
