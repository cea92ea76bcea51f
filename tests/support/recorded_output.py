"""Records the output of a call, including that of the processes it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from tempfile import TemporaryFile


@dataclass
class RecordedOutput:
    """The recorded text; both are empty until the recording has ended."""

    out: str = ""
    err: str = ""


@contextmanager
def record_output() -> Iterator[RecordedOutput]:
    """Record stdout and stderr of this process and of the processes that it starts.

    Unlike pytest's `capfd` it needs no fixture, so that helpers can use it.
    """
    recorded = RecordedOutput()
    sys.stdout.flush()
    sys.stderr.flush()
    with TemporaryFile() as out, TemporaryFile() as err:
        before = [os.dup(1), os.dup(2)]
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            with (
                os.fdopen(1, "w", 1, "utf-8", "backslashreplace", closefd=False) as our_out,
                os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False) as our_err,
                redirect_stdout(our_out),
                redirect_stderr(our_err),
            ):
                yield recorded
        finally:
            for number, kept in enumerate(before, start=1):
                os.dup2(kept, number)
                os.close(kept)
            out.seek(0)
            err.seek(0)
            recorded.out, recorded.err = out.read().decode(), err.read().decode()
