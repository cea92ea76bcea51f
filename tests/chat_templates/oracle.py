"""The tokens that training must cover, found with transformers alone.

For each turn of the assistant: the prompt that a server sends, and the tokens that the model has to
produce after that prompt, up to and including the token at which the server stops. Nothing here
imports payload.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chat_templates.conversations import TOOL_WORDS, Messages, answer_words
from tests.chat_templates.tokenizer import SPECIAL

_THOUGHT_TAG = (
    r"(?:<[a-z:]*think[a-z:]*>|</[a-z:]*think[a-z:]*>|<\|(?:START|END)_THINKING\|>"
    r"|<\|channel>thought\n<channel\|>|\[/?THINK\]|<\|(?:open|close)\|>think<\|sep\|>"
    r"|Here are my reasoning steps:\n)"
)
_OPENS = re.compile(rf"(?:{_THOUGHT_TAG}\s*)+$")
_CLOSES = re.compile(
    r"(?:</[a-z:]*think[a-z:]*>|<\|END_THINKING\|>|<channel\|>|\[/THINK\]|<\|close\|>think<\|sep\|>)\s*$"
)
_EMPTY_THOUGHT = re.compile(rf"\s*(?:{_THOUGHT_TAG}\s*)+")


Span = tuple[int, int]


class NoStopError(Exception):
    """No stop token follows an answer, so a server would never stop there."""


class LostError(Exception):
    """The template leaves a part of the row out."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the assistant."""

    context: tuple[int, ...]
    """Tokens up to the end of a trained part."""
    count: int
    """Number of tokens at the end of `context` that are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The contents that the samples of a row must have."""

    turns: list[Turn]
    texts: list[str] = field(repr=False)
    """Every text that a sample may have."""


class Oracle:
    """Works out the samples of one template's rows."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer in `folder`."""
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        stops = [re.escape(each) for each in self._tokenizer.convert_ids_to_tokens(ids)]
        self._stop = re.compile("|".join(stops))
        self._is_marked = "generation %}" in self._tokenizer.chat_template or (
            "generation -%}" in self._tokenizer.chat_template
        )

    def tokens_of(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a rendered text."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def text(self, messages: Messages, row: Mapping[str, Any], *, prompt: bool = False) -> str:
        """Return transformers' rendering. Raises what transformers raises."""
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=row.get("tools"), tokenize=False, add_generation_prompt=prompt
        )
        return text

    def expected(self, row: Mapping[str, Any]) -> Expected:
        """Return the turns of a row, and its possible texts.

        Raises NoStopError, LostError, or what transformers raises.
        """
        messages = row["messages"]
        whole = self.text(messages, row)
        if "tools" in row:
            _require(TOOL_WORDS, whole, "tools")
        for message in messages:
            if message["role"] != "assistant":
                _require(answer_words(message), whole, message["role"])
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        found = [self._turn(row, i) for i in answers]
        together = all(whole.startswith(text[:end]) for text, _, end in found)
        if self._is_marked and together:
            turns = self._masked(row, messages, [(start, end) for _, start, end in found])
        elif self._is_marked:
            shown = [messages[: index + 1] for index in answers]
            turns = [
                turn
                for each, (_, start, end) in zip(shown, found, strict=True)
                for turn in self._masked(row, each, [(start, end)])
            ]
        else:
            texts = [whole if together else text for text, _, _ in found]
            turns = [
                self._tokens(text, start, end)
                for text, (_, start, end) in zip(texts, found, strict=True)
            ]
        cut = [text[:end] for text, _, end in found]
        return Expected(turns=turns, texts=[whole, *(text for text, _, _ in found), *cut])

    def _turn(self, row: Mapping[str, Any], index: int) -> tuple[str, int, int]:
        """Return the text that shows a turn as the last one, and the span of its answer.

        A stop token that the template writes with the next message is appended.
        """
        messages = row["messages"]
        words = answer_words(messages[index])
        prompt = self.text(messages[:index], row, prompt=True)
        alone = self.text(messages[: index + 1], row)
        texts = [alone]
        following = messages[index + 1 : index + 2] or [{"role": "user", "content": "of tundra"}]
        try:
            texts.append(self.text([*messages[: index + 1], *following], row))
        except Exception:  # transformers passes on the template's error, of any class
            assert index + 1 == len(messages)
        header = self._header(messages[:index], row, prompt)
        answered = _last_end(words, alone)
        for text in texts:
            last = _last_end(words, text)
            if last is None:
                # Where the stop token comes with the next message, that message can drop a thought.
                last = _last_end(words[-1:], text)
            stop = None if last is None else self._stop.search(text, last)
            if stop is None or (header and header in text[last : stop.start()]):
                continue
            added = text[last : stop.end()]
            shown, end = text if _last_end(words, text) is not None else "", stop.end()
            if text is not alone:
                shown = shown[:end]
                if answered is not None and added.startswith(alone[answered:]):
                    # The stop token alone comes from the next message.
                    shown, end = alone[:answered] + added, answered + len(added)
            if not shown:
                continue
            start = _answer_start(
                prompt,
                shown,
                limit=min(shown.rindex(word) for word in words),
                has_thought="reasoning_content" in messages[index],
            )
            return shown, start, end
        for text in texts:
            _require(words, text, "assistant")
        raise NoStopError

    def _header(self, messages: Messages, row: Mapping[str, Any], prompt: str) -> str:
        """Return the special token that begins a turn of the assistant, or an empty text."""
        added = prompt.removeprefix(self.text(messages, row))
        found = SPECIAL.search(added) if len(added) < len(prompt) else None
        return found[0] if found else ""

    def _tokens(self, text: str, start: int, end: int) -> Turn:
        encoded = self._tokenizer(text, add_special_tokens=False)
        first, last = encoded.char_to_token(start), encoded.char_to_token(end - 1)
        return Turn(tuple(encoded["input_ids"][: last + 1]), last + 1 - first)

    def _masked(self, row: Mapping[str, Any], shown: Messages, spans: list[Span]) -> list[Turn]:
        """Return the runs of transformers' assistant mask, each with the stop token after it.

        `spans` are the answers whose runs count.
        """
        encoded = self._tokenizer.apply_chat_template(
            shown, tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        mask = list(encoded["assistant_masks"])
        stops = [encoded.char_to_token(end - 1) for _, end in spans]
        for stop in stops:
            mask[stop] |= mask[stop - 1]
        first = min(encoded.char_to_token(start) for start, _ in spans)
        return [each for each in runs(encoded["input_ids"], mask) if len(each.context) > first]


def runs(ids: Sequence[int], mask: Sequence[int]) -> list[Turn]:
    """Return every maximal run of trained tokens."""
    ends = [i + 1 for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]
    found = []
    for end in ends:
        start = end
        while start and mask[start - 1]:
            start -= 1
        found.append(Turn(tuple(ids[:end]), end - start))
    return found


def _last_end(words: list[str], text: str) -> int | None:
    """Return the end of the last of these terms in the text; None if one is missing."""
    if any(word not in text for word in words):
        return None
    return max(text.rindex(word) + len(word) for word in words)


def _require(words: tuple[str, ...] | list[str], text: str, what: str) -> None:
    """Raise LostError if the text lacks one of these terms."""
    missing = [word for word in words if word not in text]
    if missing:
        raise LostError(f"{what}: {', '.join(missing)}")


def _answer_start(prompt: str, text: str, *, limit: int, has_thought: bool) -> int:
    """Return where the answer begins in `text`, which shows the answer after the prompt.

    The answer's first word is at `limit`.
    """
    opened = _OPENS.search(prompt)
    header = prompt[: opened.start()] if opened else prompt
    if text.startswith(prompt):
        start = len(prompt)
    elif text.startswith(header):
        leaves_open = opened is not None and _CLOSES.search(prompt) is None
        start = _common(prompt, text) if has_thought and leaves_open else len(header)
    else:
        start = _after_header(header, prompt, text, limit=limit)
    if opened and not has_thought and (empty := _EMPTY_THOUGHT.match(text, start)):
        start = empty.end()
        if _CLOSES.search(prompt):
            # The prompt ends behind the thoughts: the model writes what the prompt lacks.
            mark_end = empty.start() + len(empty[0].rstrip())
            start = _after_space(prompt[len(prompt.rstrip()) :], text, mark_end)
    return start


def _common(one: str, other: str) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def _after_space(space: str, text: str, end: int) -> int:
    """Return where the text continues after `end` behind the white space of a prompt's end.

    If the text has only the last part of it there, behind that part.
    """
    tails = (space[index:] for index in range(len(space)))
    return end + next((len(each) for each in tails if text.startswith(each, end)), 0)


def _after_header(header: str, prompt: str, text: str, *, limit: int) -> int:
    """Return where the prompt's end is in a text that renders the earlier messages otherwise.

    That is the end of the longest possible end of `header` behind the common start of both texts.
    """
    common = _common(prompt, text)
    marks = header.rstrip()
    for start in range(len(marks)):
        place = text.rfind(marks[start:], 0, limit)
        end = place + len(marks) - start
        if place >= 0 and end >= common:
            return _after_space(header[len(marks) :], text, end)
    return min(common, limit)
