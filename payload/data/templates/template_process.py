"""Starts and calls the process that renders a chat template."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.data.sources.worker_exit import describe_exit, end_worker

CPU_SECONDS = 10
"""Processor time limit of a conversation; the longest real ones take hundredths of a second."""
MEMORY_BYTES = 2**30
"""Limit of the address space of the process, including 50 MiB for Python."""

_WORKER = Path(__file__).with_name("template_worker.py")
_MAX_ANSWER_BYTES = 512 * 2**20


MAX_CONSECUTIVE_ENDS = 5
"""Highest number of consecutive conversations that may end the process.

Each of them can take `CPU_SECONDS`.
"""


class TemplateFailedError(Exception):
    """The template raised an error, or exceeded its limits."""


class TemplateUnusableError(TemplateFailedError):
    """The template ended the process for several consecutive conversations."""


class _WorkerEndedError(TemplateFailedError):
    """The process ended before it answered."""


class TemplateProcess:
    """A process with one compiled template, restarted after a conversation has ended it.

    Every method raises TemplateFailedError.
    """

    is_marked: bool
    """True if the template has `{% generation %}` blocks."""
    named_tokens: list[str]
    """Names like `bos_token` that the template reads but does not set."""
    is_sequential: bool
    """True if later messages certainly never change the text of a message."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Compile `source`, a Jinja program that can use the special tokens `tokens`."""
        self._template = {"source": source, "tokens": dict(tokens)}
        self._worker: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._consecutive_ends = 0
        self.start()

    def start(self) -> None:
        """Compile the template in a new process."""
        self._worker = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(CPU_SECONDS), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._owner = os.getpid()
        weakref.finalize(self, _end_owned, self._worker, self._owner)
        found = self._exchange({"do": "compile", **self._template})
        self.is_marked, self.named_tokens = found["is_marked"], found["named_tokens"]
        self.is_sequential = found["is_sequential"]

    def call(self, method: str, **request: object) -> Any:
        """Return the result of the worker's `method`."""
        try:
            # A forked process shares the pipes of its parent: both would read each other's
            # responses.
            if self._worker is None or self._owner != os.getpid():
                self.start()
            answer = self._exchange({"do": method, **request})
        except _WorkerEndedError as error:
            self._consecutive_ends += 1
            if self._consecutive_ends < MAX_CONSECUTIVE_ENDS:
                raise
            reason = f"{self._consecutive_ends} consecutive conversations failed: {error}"
            raise TemplateUnusableError(reason) from None
        except TemplateFailedError:
            self._consecutive_ends = 0
            raise
        self._consecutive_ends = 0
        return answer

    def _exchange(self, request: Mapping[str, object]) -> Any:
        worker = self._worker
        assert worker is not None and worker.stdin is not None and worker.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(json.dumps(request, default=_placeholder).encode() + b"\n")
                worker.stdin.flush()
            content = worker.stdout.readline(_MAX_ANSWER_BYTES)
            if not content:
                worker.wait()
        except BaseException:
            self._discard_worker()
            raise
        if not content.endswith(b"\n"):
            # Otherwise the next request would read the rest of this response.
            self._discard_worker()
            raise _WorkerEndedError(_describe_exit(worker.returncode))
        answer = json.loads(content)
        if "error" in answer:
            raise TemplateFailedError(answer["error"])
        return answer["answer"]

    def _discard_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            _end_owned(worker, self._owner)


def _placeholder(value: object) -> str:
    """Return the text that replaces, as in transformers, a value of another type than JSON's."""
    return f"<{type(value).__name__}>"


def _describe_exit(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it used over {CPU_SECONDS} s of processor time for one conversation."
    return f"its process ended with {describe_exit(status)}."


def _end_owned(worker: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        end_worker(worker)
