"""Decodes tokens one by one with any tokenizer, and stops at given texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from payload.generate.shared_text import unfinished

_INCOMPLETE = "\ufffd"
_CONTEXT_TOKENS = 8


class TextStream:
    """Decodes a continuation token by token. All returned pieces together are the whole text.

    A token can end within a character. The character is then returned with the token that completes
    the character. Some tokenizers drop a space before the first token that they decode. So the last
    tokens of the prompt are decoded together with the continuation, and the prompt's text is then
    removed.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, prompt: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._emitted = decode(self._window) if self._window else ""
        self.text = ""
        """The continuation so far, as text."""

    def add(self, token: int) -> str:
        """Return the text that this token completes."""
        self._window.append(token)
        text = self._decode(self._window)
        # Only the last character can still change: its bytes may start a longer character.
        stable = text.removesuffix(_INCOMPLETE)
        piece = self._rest(stable)
        if stable == text:
            self._shorten()
        return piece

    def finish(self) -> str:
        """Return the rest of the text. Bytes that do not complete a character become U+FFFD."""
        return self._rest(self._decode(self._window)) if self._window else ""

    def _rest(self, text: str) -> str:
        piece = text[len(self._emitted) :]
        if piece:
            self._emitted = text
            self.text += piece
        return piece

    def _shorten(self) -> None:
        """Drop tokens that no longer affect decoding, so that the time per token stays constant."""
        if len(self._window) > 2 * _CONTEXT_TOKENS:
            window = self._window[-_CONTEXT_TOKENS:]
            emitted = self._decode(window)
            if self._emitted.endswith(emitted) and not emitted.startswith(_INCOMPLETE):
                self._window, self._emitted = window, emitted


class StopText:
    """Cuts a streamed text before the first of several stop strings.

    If the text ends with the beginning of a stop string, this end is held back until more text
    follows.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False
        """True once a stop string was found; no more text is returned."""

    def add(self, piece: str) -> str:
        """Return the text that is certainly before any stop string."""
        if self.found:
            return ""
        text = self._held + piece
        positions = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if positions:
            self.found, self._held = True, ""
            return text[: min(positions)]
        held = max((unfinished(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the rest of the text, which was held back because a stop string could begin
        there."""
        rest, self._held = self._held, ""
        return rest
