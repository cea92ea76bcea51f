"""What commands print through: text that others wrote cannot steer the terminal or end a run."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from payload.untrusted import printable

_PIPE_WIDTH = 200


class TextConsole(Console):
    """A console for plain text and tables: no markup, no emoji codes, no colours by content.

    Escape sequences and control characters are removed, also from table cells: most of what is
    printed comes from nodes, logs and run folders.
    """

    def __init__(self, *, stderr: bool) -> None:
        self._output = _Output(sys.stderr if stderr else sys.stdout)
        super().__init__(
            file=cast(TextIO, self._output),
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
        )
        if not self.is_terminal:
            self.width = _PIPE_WIDTH

    @property
    def is_closed(self) -> bool:
        """Tell whether nobody reads any more: `head` has seen enough, or the terminal is gone."""
        return self._output.is_closed

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text without anything that a terminal would obey."""
        return super().render_str(printable(text), **options)


class _Output:
    """A standard stream that drops what it cannot write: a lost reader must not end a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as the stream does."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            return self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except OSError:
            self._close()
            return len(text)

    def flush(self) -> None:
        """Flush as the stream does."""
        try:
            self._stream.flush()
        except OSError:
            self._close()

    def _close(self) -> None:
        """Send the rest nowhere; Python would complain at its own exit otherwise."""
        self.is_closed = True
        with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


def text_console(*, stderr: bool) -> TextConsole:
    """Return the console for results (stdout) or for messages (stderr)."""
    return TextConsole(stderr=stderr)
