"""Finds the trained part of each turn in the text that a template renders."""

from __future__ import annotations

from dataclasses import dataclass

from payload.core.errors import DataError
from payload.data.templates.control_tokens import Span, without_marks
from payload.data.templates.lost_keys import leaves, require_rendered
from payload.data.templates.rendered_row import RenderedRow
from payload.data.templates.stop_tokens import first_of
from payload.data.templates.thoughts import end_of_empty_thought, prompt_tail
from payload.data.templates.turn_end import Part, num_common

_LEAST_COMMON_CHARS = 4


@dataclass(slots=True, kw_only=True)
class Turn:
    """A trained turn, with the prompt before the turn."""

    text: str
    spans: list[Span]
    """Ranges of the characters that the loss counts."""
    through: int
    """Offset at which the turn's stop token ends. The model is not trained on the text after it."""


class TurnFinder(RenderedRow):
    """Finds the turns of one conversation."""

    def turns(self) -> tuple[str, list[Turn]]:
        """Return the text of the whole conversation, and the trained turns in order."""
        self._require_documents()
        return self._marked_turns() if self._template.process.is_marked else self._added_turns()

    def _added_turns(self) -> tuple[str, list[Turn]]:
        """Return the whole text, and the turns, for a template without blocks."""
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
            turns.append(Turn(text=text, spans=[(start, end)], through=end))
        return whole, turns

    def _follows(self, number: int, text: str, start: int) -> bool:
        """Return True if the text continues at `start` with the unchanged content of a message."""
        return text[start:].lstrip().startswith(str(self._messages[number]["content"]).strip())

    def _marked_turns(self) -> tuple[str, list[Turn]]:
        """Return the whole text, and the turns, for a template with `{% generation %}` blocks.

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

    def _marked_turn(self, number: int, text: str, blocks: list[Span]) -> Turn:
        blocks = [(start, end) for start, end in blocks if end > start]
        if not blocks:
            raise self._error(
                number, "the message is in no {% generation %} block, so it is not trained."
            )
        (start, _), (begin, last) = blocks[0], blocks[-1]
        self._require_rendered(number, text[:last], start)
        found, end = self._ended(text, start, number)
        if end > last:
            # The stop token belongs to the turn, although it comes after the block.
            if found == text and text[last:end].strip() not in self._stops(number):
                raise self._no_stop(number)
            blocks = [*blocks[:-1], (begin, end)]
        return Turn(text=found, spans=blocks, through=end)

    def _located(self, number: int, prompt: str, answered: str) -> tuple[str, int]:
        """Return the text of a turn with its prompt, and where the trained part begins.

        `answered` is the rendered conversation with the turn as the last message. The trained part
        can begin before the end of the prompt if the prompt ends with reasoning tags such as
        `<think>`.
        """
        end = self._end(number)
        if number == 0 and not prompt and end is not None and end.header:
            # The template cannot render the prompt of a conversation that begins with an answer.
            tail = prompt_tail(end.header)
            head = end.header.removesuffix(tail.text if tail else "")
            place = answered.find(head)
            prompt = answered[:place] + end.header if place >= 0 else ""
        tail = prompt_tail(prompt)
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
            # If the prompt lacks white space after the marks, the model writes it.
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
        """Return where the prompt ends in `answered`.

        Earlier messages may be rendered differently there.

        The prompt ends after the longest suffix of `head` that occurs in `answered` before the
        answer. The white space at the end of `head` may differ there.
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
        """Return the text of a turn including a stop token, and the index after this token."""
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
        """Return where the last value of a message ends in `text`, or an earlier index.

        The stop token is searched after this index, because a value can contain a stop token.
        """
        message, stops = self._messages[number], self._stops(number)
        ends = [start]
        for value in (self._thought(number), message.get("content"), message.get("tool_calls")):
            if not value:
                continue
            place = start
            for leaf in (value,) if isinstance(value, str) else leaves(value):
                # Many data sets have the stop token at the end of the content.
                short = leaf.strip()
                for stop in stops:
                    short = short.removesuffix(stop)
                found = text.find(short, place)
                place = found + len(short) if found >= 0 else place
            ends.append(place)
        return max(ends)

    def _require_documents(self) -> None:
        """Raise DataError if the template leaves out the row's documents."""
        if not self._documents:
            return
        texts = [
            self._template.parts(
                self._messages,
                [(len(self._messages), False)],
                tools=self._tools,
                documents=documents,
                variables=self._variables,
            )[0].get("text")
            for documents in (self._documents, None)
        ]
        if texts[0] == texts[1]:
            raise DataError(
                f"{self._template.where}: the template leaves out the documents, so training would "
                "lose them. Choose a template that renders documents (--chat-template), or ignore "
                "the documents (--ignore-key documents)."
            )

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

    def _no_stop(self, number: int) -> DataError:
        return self._error(
            number,
            "no stop token follows the message, so the model would not learn to stop. Add "
            "{{ eos_token }} after the assistant's text in the template, and pass the file with "
            "--chat-template.",
        )


def _overlap(ending: str, text: str, start: int) -> int:
    """Return the length of the longest suffix of `ending` that `text` has at `start`.

    A short suffix can match by chance. For such a suffix the result is 0, except for white space.
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
