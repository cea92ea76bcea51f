"""The process that renders a chat template, as the one sees it that started it."""

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

from payload.data.sources.worker_exit import end_worker, how_it_ended

CPU_SECONDS = 10
"""Processor time for one conversation; the longest of real ones take some hundredths."""
MEMORY_BYTES = 2**30
"""Address space of the process, with Python's own 50 MiB."""

_WORKER = Path(__file__).with_name("template_worker.py")
_MAX_ANSWER_BYTES = 512 * 2**20


MOST_ENDED = 5
"""Conversations one after the other that may end the process: each takes up to `CPU_SECONDS`."""


class TemplateFailedError(Exception):
    """The template failed, in its own words or by what it cost."""


class TemplateHopelessError(TemplateFailedError):
    """The template ended the process for many conversations one after the other."""


class _EndedError(TemplateFailedError):
    """The process ended."""


class TemplateProcess:
    """A process that has compiled one template. It is started again when a conversation ended it.

    Every method raises TemplateFailedError.
    """

    is_marked: bool
    """The template has `{% generation %}` blocks."""
    named_tokens: list[str]
    """Names like `bos_token` that the template reads and does not set."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens` are those that the Jinja program `source` may name, such as `bos_token`."""
        self._template = {"source": source, "tokens": dict(tokens)}
        self._worker: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._ended = 0
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
        weakref.finalize(self, _end, self._worker, self._owner)
        found = self._exchange({"do": "compile", **self._template})
        self.is_marked, self.named_tokens = found["is_marked"], found["named_tokens"]

    def ask(self, what: str, **request: object) -> Any:
        """Return what the worker's method `what` answers."""
        try:
            # A fork has its parent's pipes: two that ask would get each other's answers.
            if self._worker is None or self._owner != os.getpid():
                self.start()
            answer = self._exchange({"do": what, **request})
        except _EndedError as error:
            self._ended += 1
            if self._ended < MOST_ENDED:
                raise
            reason = f"of {self._ended} conversations one after the other, each had this: {error}"
            raise TemplateHopelessError(reason) from None
        except TemplateFailedError:
            self._ended = 0
            raise
        self._ended = 0
        return answer

    def _exchange(self, request: Mapping[str, object]) -> Any:
        worker = self._worker
        assert worker is not None and worker.stdin is not None and worker.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(json.dumps(request).encode() + b"\n")
                worker.stdin.flush()
            content = worker.stdout.readline(_MAX_ANSWER_BYTES)
            if not content:
                worker.wait()
        except BaseException:
            self._forget()
            raise
        if not content.endswith(b"\n"):
            # The rest of the answer would be taken for the next one's.
            self._forget()
            raise _EndedError(_cause_of_end(worker.returncode))
        answer = json.loads(content)
        if "error" in answer:
            raise TemplateFailedError(answer["error"])
        return answer["answer"]

    def _forget(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            _end(worker, self._owner)


def _cause_of_end(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it took over {CPU_SECONDS} s of processor time for one conversation."
    return f"the process that renders it ended with {how_it_ended(status)}."


def _end(worker: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        end_worker(worker)
