"""Reads a store through a helper process, so that a hanging store cannot block the caller.

A process that reads a mount may be impossible to kill after the file server is gone. The helper is
`python -m payload.storage serve`. It answers each request on its stdin with frames on its stdout: a
line of JSON, followed by n bytes of content after `{"bytes": n}`.
"""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, BinaryIO, cast

from payload.config.store_address import StoreAddress
from payload.core.errors import TileforgeError
from payload.core.python_processes import code_environment, module_command
from payload.storage.objects import (
    ConflictError,
    MissingObjectError,
    ObjectStore,
    StoredObject,
    StoreError,
    StoreReader,
    StoreRefusedError,
    TooLargeError,
)
from payload.storage.opening import open_store

_NOTE_S = 10.0
_FOLDER_S = 60.0
_BUCKET_S = 150.0
"""Time limit for a bucket. The limit exceeds the client's own limit of two minutes, because the
client's error has more details."""
_END_S = 0.2
_READ_BYTES = 2**20
_ERRORS: Mapping[str, type[TileforgeError]] = {
    error.__name__: error
    for error in (StoreError, MissingObjectError, TooLargeError, ConflictError, StoreRefusedError)
}


@contextmanager
def watched_store(
    address: StoreAddress,
    *,
    env: Mapping[str, str],
    say: Callable[[str], None],
    most_s: float | None = None,
    note_s: float = _NOTE_S,
) -> Iterator[StoreReader]:
    """Yield a store for reading. Its methods raise StoreError after `most_s` without an answer.

    After `note_s` without an answer, `say` receives a line. By default, `most_s` is a minute for a
    folder; for a bucket, it is longer than the timeout of Google's client. `env` is the helper's
    environment.
    """
    if most_s is None:
        most_s = _FOLDER_S if address.bucket is None else _BUCKET_S
    store = _WatchedStore(address, env=env, say=say, most_s=most_s, note_s=note_s)
    try:
        yield store
    finally:
        store.close()


class _WatchedStore:
    """Runs every method in the helper. Not thread-safe."""

    def __init__(
        self,
        address: StoreAddress,
        *,
        env: Mapping[str, str],
        say: Callable[[str], None],
        most_s: float,
        note_s: float,
    ) -> None:
        self.address = address
        self._say = say
        self._most_s = most_s
        self._note_s = note_s
        arguments = ["serve", "--below", str(address.num_below), str(address)]
        self._process = subprocess.Popen(
            module_command("payload.storage", *arguments),
            env=code_environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # only the caller handles Ctrl-C, and ends the helper
        )
        self._received = bytearray()

    def close(self) -> None:
        """Kill the helper. A helper that hangs in the kernel ends only when the mount responds."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def entries(self, prefix: str = "") -> list[StoredObject]:
        """List the objects whose names begin with `prefix`."""
        return [StoredObject(**each) for each in self._request("entries", prefix)]

    def groups(self) -> list[str]:
        """List the first-level folders."""
        return list(self._request("groups"))

    def siblings(self) -> list[str]:
        """List the first-level folders of the parent address."""
        return list(self._request("siblings"))

    def read(self, name: str) -> tuple[bytes, int]:
        """Return a small object's content and generation."""
        content = io.BytesIO()
        generation = self._request("read", name, into=content)
        return content.getvalue(), int(generation)

    def fetch(
        self, name: str, into: BinaryIO, *, most_bytes: int, progressed: Callable[[], None]
    ) -> None:
        """Write a whole object to `into`."""
        self._request("fetch", name, str(most_bytes), into=into, progressed=progressed)

    def _request(
        self,
        verb: str,
        *arguments: str,
        into: BinaryIO | None = None,
        progressed: Callable[[], None] = lambda: None,
    ) -> Any:
        """Send a request to the helper and return the answer; file content is written to `into`.

        Raises the store's errors.
        """
        assert self._process.stdin is not None
        with self._unbroken():
            self._process.stdin.write(json.dumps([verb, *arguments]).encode() + b"\n")
            self._process.stdin.flush()
        while True:
            frame = json.loads(self._line())
            if "error" in frame:
                raise _ERRORS[frame["kind"]](frame["error"])
            if "bytes" not in frame:
                return frame["done"]
            assert into is not None
            left = int(frame["bytes"])
            while left:
                part = self._some(left)
                into.write(part)
                left -= len(part)
            progressed()

    def _line(self) -> bytes:
        while (end := self._received.find(b"\n")) < 0:
            self._receive()
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _some(self, most: int) -> bytes:
        if not self._received:
            self._receive()
        part = bytes(self._received[:most])
        del self._received[:most]
        return part

    def _receive(self) -> None:
        """Wait for more of the answer. Raises StoreError after the timeout."""
        assert self._process.stdout is not None
        began_s, is_noted = time.monotonic(), False
        while True:
            waited_s = time.monotonic() - began_s
            until_s = self._most_s if is_noted else min(self._note_s, self._most_s)
            if select.select([self._process.stdout], [], [], max(0.0, until_s - waited_s))[0]:
                break
            if until_s == self._most_s:
                raise StoreError(
                    f"{self.address} did not answer within {self._most_s:.0f} s. Check that the "
                    "folder is mounted and that its server runs."
                )
            is_noted = True
            self._say(
                f"waiting for {self.address}: no answer for {self._note_s:.0f} s; timeout after "
                f"{self._most_s:.0f} s"
            )
        with self._unbroken():
            part = os.read(self._process.stdout.fileno(), _READ_BYTES)
            if not part:
                raise BrokenPipeError
            self._received += part

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise StoreError(
                f"{self.address}: the process that reads this store has ended. Try again."
            ) from None


def serve(address: StoreAddress, requests: BinaryIO, answers: BinaryIO) -> None:
    """Serve requests until the input ends; this runs in the helper."""

    def send_frame(**frame: object) -> None:
        answers.write(json.dumps(frame).encode() + b"\n")
        answers.flush()

    def send(content: bytes) -> None:
        send_frame(bytes=len(content))
        answers.write(content)
        answers.flush()

    store: ObjectStore | None = None
    for line in requests:
        verb, *arguments = json.loads(line)
        try:
            store = store or open_store(address)
            if verb == "entries":
                send_frame(done=[asdict(entry) for entry in store.entries(*arguments)])
            elif verb == "groups":
                send_frame(done=store.groups())
            elif verb == "siblings":
                send_frame(done=store.siblings())
            elif verb == "read":
                content, generation = store.read(*arguments)
                send(content)
                send_frame(done=generation)
            else:
                name, most_bytes = arguments
                sink = cast(BinaryIO, _Sink(send))
                store.fetch(name, sink, most_bytes=int(most_bytes), progressed=lambda: None)
                send_frame(done=None)
        except (StoreError, StoreRefusedError) as error:
            send_frame(error=str(error), kind=type(error).__name__)


class _Sink:
    """The file methods that `ObjectStore.fetch` uses; written content is sent to the caller."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send

    def write(self, content: bytes) -> int:
        """Send the content; return its size in bytes."""
        self._send(content)
        return len(content)
