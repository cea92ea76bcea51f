"""How samples are shown: as text while they are made, or as JSON when they are done."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from payload.generate.codec import Codec
from payload.generate.detokenizer import StopText, TextStream

BETWEEN = "\n---\n"
"""Stands between two texts."""


@dataclass(kw_only=True)
class Sample:
    """One continuation: its tokens, and its text as far as it is certain."""

    codec: Codec
    prompt: Sequence[int]
    stops: Sequence[str]
    seed: int
    num_tokens: int = 0
    text: str = ""
    _stream: TextStream = field(init=False)
    _stop: StopText = field(init=False)
    _is_finished: bool = False

    def __post_init__(self) -> None:
        self._stream = TextStream(self.codec.decode, prompt=self.prompt)
        self._stop = StopText(self.stops)

    def add(self, token: int) -> bool:
        """Take the next token; False when the text ends with it."""
        self.num_tokens += 1
        self.text += self._stop.add(self._stream.add(token))
        return not self._stop.found

    def finish(self) -> None:
        """Take what was held back: no token comes any more."""
        if not self._is_finished:
            self._is_finished = True
            self.text += self._stop.add(self._stream.finish()) + self._stop.finish()

    def as_row(self) -> dict[str, object]:
        """Return what JSON says of it."""
        return {"text": self.text, "num_tokens": self.num_tokens, "seed": self.seed}


class TextOutput:
    """Shows the first sample as it is made and, when it is done, the others of its prompt."""

    def __init__(
        self, prompt: str, samples: Sequence[Sample], *, write: Callable[[str], None]
    ) -> None:
        self._prompt = prompt
        self._samples = samples
        self._write = write
        self._is_begun = False
        self._printed = 0

    def go_on(self) -> None:
        """Show what is new of the first sample."""
        text = self._samples[0].text
        new = text[self._printed :]
        # No text begins before the model gives a token.
        if new or (not self._is_begun and self._samples[0].num_tokens):
            self._write(self._begin() + new)
            self._printed = len(text)

    def end(self) -> None:
        """Show what is left of the first sample, and the other samples."""
        rest = self._begin() + self._samples[0].text[self._printed :]
        others = [self._prompt + sample.text for sample in self._samples[1:]]
        self._write(BETWEEN.join([rest, *others]) + "\n")

    def _begin(self) -> str:
        is_begun, self._is_begun = self._is_begun, True
        return "" if is_begun else self._prompt


class JsonOutput:
    """Shows one object at the end."""

    def __init__(
        self,
        prompt: str,
        samples: Sequence[Sample],
        *,
        checkpoint: str,
        write: Callable[[str], None],
    ) -> None:
        self._prompt = prompt
        self._samples = samples
        self._checkpoint = checkpoint
        self._write = write

    def go_on(self) -> None:
        """Show nothing yet."""

    def end(self) -> None:
        """Show all samples."""
        rows = [sample.as_row() for sample in self._samples]
        result = {"checkpoint": self._checkpoint, "prompt": self._prompt, "samples": rows}
        self._write(json.dumps(result) + "\n")


class InOrder:
    """Shows results in the order of their prompts, which are finished in another one."""

    def __init__(
        self, outputs: Sequence[TextOutput] | Sequence[JsonOutput], *, between: Callable[[], None]
    ) -> None:
        """`between` is called between two results."""
        self._outputs = outputs
        self._between = between
        self._finished: set[int] = set()
        self._next = 0
        self._announced: set[int] = set()

    def go_on(self, places: Sequence[int]) -> None:
        """Show what is new of the next prompt, when it is one of `places`."""
        if self._next in places:
            self._announce(self._next)
            self._outputs[self._next].go_on()

    def end(self, places: Sequence[int]) -> None:
        """Take these as finished; show those whose turn it is."""
        self._finished |= set(places)
        while self._next in self._finished:
            self._show(self._next)

    def interrupt(self, places: Sequence[int]) -> None:
        """Show these and all that waited for their turn: no other result comes any more."""
        self.end(places)
        for place in sorted(each for each in self._finished if each > self._next):
            self._show(place)

    def _show(self, place: int) -> None:
        self._announce(place)
        self._outputs[place].end()
        self._next = place + 1

    def _announce(self, place: int) -> None:
        """Divide a result from the one before it, once."""
        if self._announced and place not in self._announced:
            self._between()
        self._announced.add(place)
