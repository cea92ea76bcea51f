"""Prints samples: as text while they are generated, or as JSON when they are complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from payload.generate.answers import Answer, ChatFormat
from payload.generate.chat import shown_call
from payload.generate.detokenizer import StopText, TextStream
from payload.generate.prompts import Prompt

BETWEEN = "\n---\n"
"""Separates two texts."""


@dataclass(kw_only=True)
class Sample:
    """One continuation: the tokens, and the part of the text that later tokens cannot change."""

    decode: Callable[[Sequence[int]], str]
    prompt: Sequence[int]
    stops: Sequence[str]
    seed: int
    num_tokens: int = 0
    text: str = ""
    _stream: TextStream = field(init=False)
    _stop: StopText = field(init=False)
    _is_finished: bool = False

    def __post_init__(self) -> None:
        self._stream = TextStream(self.decode, prompt=self.prompt)
        self._stop = StopText(self.stops)

    def add(self, token: int) -> bool:
        """Add the next token; return False if this token ends the text."""
        self.num_tokens += 1
        self.text += self._stop.add(self._stream.add(token))
        return not self._stop.found

    def finish(self) -> None:
        """Add the text that was held back; no more tokens follow."""
        if not self._is_finished:
            self._is_finished = True
            self.text += self._stop.add(self._stream.finish()) + self._stop.finish()

    def as_row(self) -> dict[str, object]:
        """Return the sample for JSON."""
        return {"text": self.text, "num_tokens": self.num_tokens, "seed": self.seed}


@dataclass(kw_only=True)
class ChatSample(Sample):
    """One answer of a chat. `text` has no thoughts, tool calls and special tokens."""

    form: ChatFormat
    rendered: str
    """The rendered conversation before the answer."""
    _generated: str = ""
    _answer: Answer = field(default_factory=Answer)

    def add(self, token: int) -> bool:
        """Add the next token; return False if this token ends the answer."""
        self.num_tokens += 1
        self._generated += self._stop.add(self._stream.add(token))
        self._divide(is_finished=False)
        return not self._stop.found

    def finish(self) -> None:
        """Add the text that was held back; no more tokens follow."""
        if not self._is_finished:
            self._is_finished = True
            self._generated += self._stop.add(self._stream.finish()) + self._stop.finish()
            self._divide(is_finished=True)

    def as_row(self) -> dict[str, object]:
        """Return the answer for JSON."""
        return {**self._answer.as_row(), "num_tokens": self.num_tokens, "seed": self.seed}

    def _divide(self, *, is_finished: bool) -> None:
        self._answer = self.form.divide(
            self._generated, prompt=self.rendered, is_finished=is_finished
        )
        self.text = self._answer.text
        if is_finished and self._answer.calls:
            calls = "\n".join(f"call: {shown_call(call)}" for call in self._answer.calls)
            self.text = f"{self.text}\n{calls}" if self.text else calls


class TextOutput:
    """Streams the first sample of a prompt, then shows the others."""

    def __init__(
        self, prompt: str, samples: Sequence[Sample], *, write: Callable[[str], None]
    ) -> None:
        self._prompt = prompt
        self._samples = samples
        self._write = write
        self._is_begun = False
        self._printed = 0

    def update(self) -> None:
        """Show the new text of the first sample."""
        text = self._samples[0].text
        new = text[self._printed :]
        # The prompt is shown with the first generated token.
        if new or (not self._is_begun and self._samples[0].num_tokens):
            self._write(self._begin() + new)
            self._printed = len(text)

    def end(self) -> None:
        """Show the rest of the first sample, and the other samples."""
        rest = self._begin() + self._samples[0].text[self._printed :]
        others = [self._prompt + sample.text for sample in self._samples[1:]]
        self._write(BETWEEN.join([rest, *others]) + "\n")

    def _begin(self) -> str:
        is_begun, self._is_begun = self._is_begun, True
        return "" if is_begun else self._prompt


class JsonOutput:
    """Shows one JSON object when all samples are complete."""

    def __init__(
        self,
        prompt: Prompt,
        samples: Sequence[Sample],
        *,
        checkpoint: str,
        write: Callable[[str], None],
    ) -> None:
        self._prompt = prompt
        self._samples = samples
        self._checkpoint = checkpoint
        self._write = write

    def update(self) -> None:
        """Do nothing, because `end` prints the JSON object with all samples."""

    def end(self) -> None:
        """Show all samples."""
        rows = [sample.as_row() for sample in self._samples]
        result = {"checkpoint": self._checkpoint, "prompt": self._prompt, "samples": rows}
        self._write(json.dumps(result) + "\n")


class OrderedOutputs:
    """Shows results in the order of the prompts, although prompts can finish in any order."""

    def __init__(
        self, outputs: Sequence[TextOutput] | Sequence[JsonOutput], *, between: Callable[[], None]
    ) -> None:
        """Store the outputs; `between` prints the separator between two results."""
        self._outputs = outputs
        self._between = between
        self._finished: set[int] = set()
        self._next = 0
        self._announced: set[int] = set()

    def update(self, indices: Sequence[int]) -> None:
        """Show the new text of the prompt that is shown next, if this prompt is in `indices`."""
        if self._next in indices:
            self._separate(self._next)
            self._outputs[self._next].update()

    def end(self, indices: Sequence[int]) -> None:
        """Record that these prompts are finished.

        Show all finished results up to the next unfinished one.
        """
        self._finished |= set(indices)
        while self._next in self._finished:
            self._show(self._next)

    def interrupt(self, indices: Sequence[int]) -> None:
        """Show the results of these prompts and all finished results. No results will follow."""
        self.end(indices)
        for index in sorted(each for each in self._finished if each > self._next):
            self._show(index)

    def _show(self, index: int) -> None:
        self._separate(index)
        self._outputs[index].end()
        self._next = index + 1

    def _separate(self, index: int) -> None:
        """Print the separator before a result, once."""
        if self._announced and index not in self._announced:
            self._between()
        self._announced.add(index)
