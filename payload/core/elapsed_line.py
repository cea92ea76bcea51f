"""A line on stderr that shows how long a slow part of a command has taken so far."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_AFTER_S = 2.0
"""Work that takes less time shows no line."""
_EVERY_S = 1.0
_CLEAR = "\r\033[K"


@contextmanager
def elapsed_line(what: str | Callable[[], str]) -> Iterator[None]:
    """During the context, show `what` and the elapsed seconds on a terminal; nothing in a pipe.

    If `what` is a function, each update of the line calls it. Code in the context must not print,
    because its text would land in the line.
    """
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(what, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(what: str | Callable[[], str], ended: threading.Event) -> None:
    began_s, wait_s, is_shown = time.monotonic(), _AFTER_S, False
    while not ended.wait(wait_s):
        shown = what if isinstance(what, str) else what()
        sys.stderr.write(f"{_CLEAR}{shown}: {time.monotonic() - began_s:.0f} s")
        sys.stderr.flush()
        wait_s, is_shown = _EVERY_S, True
    if is_shown:
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
