"""Tokens to text while they come, for any tokenizer, and where a text is to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
_CONTEXT_TOKENS = 8


class TextStream:
    """Decodes a continuation token by token; the pieces joined are its whole text.

    A token may end within a character: the piece comes when the rest does. Some tokenizers drop a
    space before the first token that they decode, so the last tokens of the prompt are decoded
    along, and left out of the pieces.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, prompt: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._given = decode(self._window) if self._window else ""
        self.text = ""
        """All that was given so far."""

    def add(self, token: int) -> str:
        """Return the text that has become certain with this token."""
        self._window.append(token)
        text = self._decode(self._window)
        # Only the last character can still change: its bytes may be the first of a longer one.
        certain = text.removesuffix(_INCOMPLETE)
        piece = self._rest(certain)
        if certain == text:
            self._shorten()
        return piece

    def finish(self) -> str:
        """Return what is left: the replacement character for bytes that never became one."""
        return self._rest(self._decode(self._window)) if self._window else ""

    def _rest(self, text: str) -> str:
        piece = text[len(self._given) :]
        if piece:
            self._given = text
            self.text += piece
        return piece

    def _shorten(self) -> None:
        """Forget tokens that cannot change what comes, so that a long text does not take longer."""
        if len(self._window) > 2 * _CONTEXT_TOKENS:
            window = self._window[-_CONTEXT_TOKENS:]
            given = self._decode(window)
            if self._given.endswith(given) and not given.startswith(_INCOMPLETE):
                self._window, self._given = window, given


class StopText:
    """Cuts a streamed text before the first of several strings, and holds back what may be one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False
        """True once a stop was found: nothing is given any more."""

    def add(self, piece: str) -> str:
        """Return the text that is certainly before any stop."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return what was held back and is no stop."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
