"""Starts and calls the process that renders a chat template."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from payload.data.sources.worker_exit import describe_exit, end_worker

CPU_SECONDS = 10
"""Limit of the processor time for a conversation. Even long conversations take hundredths of a
second."""
MEMORY_BYTES = 2**30
"""Limit of the address space of the process. Python needs 50 MiB of it."""

_WORKER = Path(__file__).with_name("template_worker.py")
_MAX_ANSWER_BYTES = 512 * 2**20
_BUFFER_BYTES = 2**18
_PIPE_BYTES = 2**20
"""Buffer size of each pipe in bytes. With this size, the two processes do not wait for each other
during a batch."""


MAX_CONSECUTIVE_ENDS = 5
"""Number of consecutive conversations that end the process, after which the template is not used.

Each such conversation can take `CPU_SECONDS`.
"""


class TemplateFailedError(Exception):
    """The template raised an error, or exceeded its limits."""


class TemplateUnusableError(TemplateFailedError):
    """The template ended the process for several consecutive conversations."""


class _WorkerEndedError(TemplateFailedError):
    """The process ended before it sent a response."""


class TemplateProcess:
    """A process with one compiled template. The process is restarted if a conversation ends it.

    Every method raises TemplateFailedError.
    """

    is_marked: bool
    """True if the template marks the assistant's text with `{% generation %}` blocks."""
    named_tokens: list[str]
    """Names such as `bos_token` that the template reads but does not set."""
    is_sequential: bool
    """True if it is certain that the text of a message never depends on later messages."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Compile the Jinja program `source`, which can use the special tokens in `tokens`."""
        self._template = {"source": source, "tokens": dict(tokens)}
        self._worker: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._consecutive_ends = 0
        self._num_sent = 0
        """Number of requests in the current batch for which no response was read yet."""
        self._received: list[Any] | None = None
        """Results of the current batch, if they had to be read before a `call`."""
        self._is_batch_safe = True
        """False after a batch ended the process, until a single call succeeds."""
        self.start()

    def start(self) -> None:
        """Compile the template in a new process."""
        self._worker = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(CPU_SECONDS), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=_BUFFER_BYTES,
        )
        self._owner = os.getpid()
        weakref.finalize(self, _end_owned, self._worker, self._owner)
        _enlarge(self._worker)
        found = self._exchange(encode("compile", **self._template))
        self.is_marked, self.named_tokens = found["is_marked"], found["named_tokens"]
        self.is_sequential = found["is_sequential"]

    def send(self, requests: Sequence[str]) -> None:
        """Send a batch of requests, each made by `encode`. `receive` returns their results.

        The process works on the batch in the meantime. Only one batch can be in progress.
        """
        assert not self._num_sent and self._received is None, "receive() comes first"
        try:
            if self._is_batch_safe:
                self._require_worker()
        except TemplateFailedError:
            self._is_batch_safe = False
        if not self._is_batch_safe:
            self._received = [None] * len(requests)
            return
        self._write(f'{{"batch": [{",".join(requests)}]}}')
        self._num_sent = len(requests)

    def receive(self) -> list[Any]:
        """Return the results of the batch's requests, in order, with None for a failed request.

        If a request ends the process, all requests without a response count as failed. The caller
        must repeat a failed request with `call`, which reports the reason.
        """
        found = self._read_batch() if self._received is None else self._received
        self._received = None
        return found

    def drop_batch(self) -> None:
        """Read the results of the batch that is under way, if any, and ignore them."""
        if self._num_sent or self._received is not None:
            self.receive()

    def note_success(self) -> None:
        """Record that a conversation of the received batch did not end the process."""
        self._consecutive_ends = 0

    def call(self, method: str, **request: object) -> Any:
        """Return the result of the worker's `method`."""
        try:
            self._require_worker()
            if self._num_sent:
                self._received = self._read_batch()
                self._require_worker()
            answer = self._exchange(encode(method, **request))
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
        self._is_batch_safe = True
        return answer

    def _require_worker(self) -> None:
        # A forked process shares the pipes of its parent: both would read each other's responses.
        if self._worker is None or self._owner != os.getpid():
            self._num_sent = 0
            self.start()

    def _read_batch(self) -> list[Any]:
        """Return the results of the batch that was sent."""
        found: list[Any] = []
        count, self._num_sent = self._num_sent, 0
        while len(found) < count:
            try:
                found.append(self._read())
            except _WorkerEndedError:
                self._is_batch_safe = False
                found += [None] * (count - len(found))
            except TemplateFailedError:
                found.append(None)
        return found

    def _exchange(self, request: str) -> Any:
        self._write(request)
        return self._read()

    def _write(self, request: str) -> None:
        assert self._worker is not None and self._worker.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                self._worker.stdin.write(request.encode() + b"\n")
                self._worker.stdin.flush()
        except BaseException:
            self._discard_worker()
            raise

    def _read(self) -> Any:
        worker = self._worker
        assert worker is not None and worker.stdout is not None
        try:
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
        answer = json.loads(content.decode("ascii"))
        if "error" in answer:
            raise TemplateFailedError(answer["error"])
        return answer["answer"]

    def _discard_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            _end_owned(worker, self._owner)


def _enlarge(worker: subprocess.Popen[bytes]) -> None:
    """Enlarge the buffers of the pipes if the system supports this, as Linux does."""
    size = getattr(fcntl, "F_SETPIPE_SZ", None)
    for pipe in (worker.stdin, worker.stdout):
        if size is not None and pipe is not None:
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe, size, _PIPE_BYTES)


def encode(method: str, **request: object) -> str:
    """Return a request for the worker's `method` as JSON, in ASCII."""
    return _ENCODER.encode({"do": method, **request})


def _placeholder(value: object) -> str:
    """Return the text that transformers uses for a value that JSON cannot represent."""
    return f"<{type(value).__name__}>"


# Values come from JSON or tables, which have no cycles to look for.
_ENCODER = json.JSONEncoder(default=_placeholder, check_circular=False)


def _describe_exit(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it used over {CPU_SECONDS} s of processor time for one conversation."
    return f"its process ended with {describe_exit(status)}."


def _end_owned(worker: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        end_worker(worker)
