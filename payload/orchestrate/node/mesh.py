"""Tests every connection between this machine and its peers, in both directions.

Runs on all nodes at the same time, with python3 only. The program is read from stdin, followed by
its arguments as a JSON object: me, address (to listen on), ports, peers (addresses by name), trial
(a random token; other connections are ignored), deadline_s, mtu (of the route to the peers, or
null). Prints a JSON object.

Each node listens on all ports, and connects to all ports of all peers until it succeeds or reaches
the deadline. So nodes can start in any order. A node ends early when all connections in both
directions have succeeded. `strangers` are names of machines outside the cluster, whose connections
are also awaited.

With `argv`, on the head, this program instead tests a launcher. The launcher starts a program on
every node. The arguments are then: ssh (its arguments, or empty), workers (addresses by name),
hosts_file and hosts (its content), argv, environment, path (folders prepended to PATH), without
(prefixes of variables to remove from the environment), keeps (prefixes of exceptions to `without`),
deadline_s.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

# Large enough to fail on a path that drops all large packets although connecting works.
BULK_BYTES = 64 * 1024
_CONNECT_S = 2.0
_BULK_S = 4.0  # 64 KiB take half a second at 1 Mbit/s
_PAUSE_S = 0.1
_ECHO_S, _ECHO_TRIES = 0.3, 3
_LINE_BYTES = 300
_HEADERS_BYTES = 28  # headers of IPv4 and UDP
_UDP_MAX_BYTES = 65_507
_SMALLER_MTUS = (8896, 1500, 1460, 1400, 1280, 576)
# From linux/in.h; Python's socket module lacks them.
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3


class Mesh:
    """State of the test on one node."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._me: str = arguments["me"]
        self._address: str = arguments["address"]
        self._ports: list[int] = arguments["ports"]
        self._peers: dict[str, str] = arguments["peers"]
        self._strangers: list[str] = arguments.get("strangers", [])
        self._trial: str = arguments["trial"]
        self._mtu: int | None = arguments["mtu"]
        self._ends: float = time.monotonic() + arguments["deadline_s"]
        self._changed = threading.Condition()
        self._reached: set[tuple[str, int]] = set()
        self._errors: dict[tuple[str, int], str] = {}
        self._heard: set[tuple[str, int]] = set()
        self._largest: dict[str, int | None] = {}

    def run(self) -> dict[str, Any]:
        """Listen, connect to all peers, wait, and return the result.

        `pairs` has, for each peer, the unreachable ports with reasons, and the largest packet that
        arrived (or null). If `port_taken` is true, retry with other ports.
        """
        with contextlib.ExitStack() as stack:
            try:
                for port in self._ports:
                    self._listen(stack, port)
            except OSError as error:
                message = f"{self._address} port {port}: {error.strerror}"
                return _answer(message, port_taken=error.errno == errno.EADDRINUSE)
            targets = {(peer, port) for peer in self._peers for port in self._ports}
            for peer, port in targets:
                self._start(self._connect, peer, port)
            callers = targets | {(name, port) for name in self._strangers for port in self._ports}
            with self._changed:
                while self._left() > 0 and not (
                    self._heard >= callers and self._reached >= targets
                ):
                    self._changed.wait(timeout=self._left())
        return _answer(None, pairs={peer: self._pair(peer) for peer in self._peers})

    def _pair(self, peer: str) -> dict[str, Any]:
        failed = {
            str(port): self._errors.get((peer, port), "no answer")
            for port in self._ports
            if (peer, port) not in self._reached
        }
        return {"failed": failed, "largest_packet": self._largest.get(peer)}

    def _left(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def _start(self, target: Any, *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _listen(self, stack: contextlib.ExitStack, port: int) -> None:
        listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self._address, port))
        listener.listen(128)
        echo = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        echo.bind((self._address, port))
        self._start(self._accept, listener, port)
        self._start(self._echo, echo)

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # the test is over and the socket is closed
            self._start(self._answer, connection, port)

    def _answer(self, connection: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError), connection:
            connection.settimeout(max(self._left(), _PAUSE_S))
            reader = connection.makefile("rb")
            hello = json.loads(reader.readline(_LINE_BYTES))
            if hello["trial"] != self._trial:
                return
            bulk = BULK_BYTES if port == self._ports[0] else 0
            if len(reader.read(bulk)) != bulk:
                return
            connection.sendall(b"got it\n")
            if reader.readline(_LINE_BYTES) == b"done\n":
                with self._changed:
                    self._heard.add((hello["me"], port))
                    self._changed.notify_all()

    def _echo(self, echo: socket.socket) -> None:
        trial = self._trial.encode()
        while True:
            try:
                packet, sender = echo.recvfrom(_UDP_MAX_BYTES)
                if packet.startswith(trial):
                    echo.sendto(trial + str(len(packet)).encode(), sender)
            except OSError:
                return

    def _connect(self, peer: str, port: int) -> None:
        while (error := self._try(peer, port)) is not None:
            self._errors[peer, port] = error
            if self._left() == 0:
                return
            time.sleep(_PAUSE_S)
        with self._changed:
            self._reached.add((peer, port))
            self._changed.notify_all()

    def _try(self, peer: str, port: int) -> str | None:
        target = (self._peers[peer], port)
        connected = "no answer"
        try:
            with socket.create_connection(target, timeout=_CONNECT_S) as connection:
                connection.settimeout(_BULK_S)
                hello = json.dumps({"trial": self._trial, "me": self._me}).encode() + b"\n"
                connection.sendall(hello)
                if port == self._ports[0]:
                    if self._largest.get(peer) is None:
                        self._largest[peer] = self._largest_packet(target)
                    connected = "the connection opens, but data is lost"
                    connection.sendall(bytes(BULK_BYTES))
                if connection.recv(_LINE_BYTES) != b"got it\n":
                    return "the connection was closed"
                connection.sendall(b"done\n")
        except TimeoutError:
            return connected
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _largest_packet(self, target: tuple[str, int]) -> int | None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((self._address, 0))
            probe.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
            probe.settimeout(_ECHO_S)
            probe.connect(target)
            # If not even a small packet arrives, UDP is blocked and the size cannot be measured.
            if self._arrives(probe, _SMALLER_MTUS[-1]):
                return next((size for size in self._packets() if self._arrives(probe, size)), None)
        return None

    def _arrives(self, probe: socket.socket, packet: int) -> bool:
        trial = self._trial.encode()
        payload = trial.ljust(packet - _HEADERS_BYTES, b".")
        for _ in range(_ECHO_TRIES):
            if self._left() < 2 * _ECHO_S:
                return False  # the peer's test can have ended
            with contextlib.suppress(OSError):
                probe.send(payload)
                if probe.recv(_LINE_BYTES) == trial + b"%d" % len(payload):
                    return True
        return False

    def _packets(self) -> Iterator[int]:
        if self._mtu is not None:
            most = min(self._mtu, _UDP_MAX_BYTES + _HEADERS_BYTES)
            yield most
            yield from (size for size in _SMALLER_MTUS if size < most)


def _answer(
    bind_error: str | None, *, port_taken: bool = False, pairs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"bind_error": bind_error, "port_taken": port_taken, "pairs": pairs or {}}


_SSH_S = 12
_LEAVE_S = 3
_MOST_BYTES = 256 * 1024


def trial(arguments: dict[str, Any], *, env: Mapping[str, str]) -> dict[str, Any]:
    """Test ssh to every worker; if all workers are reachable, test the launcher.

    `unreached` maps workers to ssh's errors. `status` is the launcher's exit status, or null if the
    launcher was not started or did not end in time.
    """
    unreached = _unreached(arguments["ssh"], arguments["workers"])
    if unreached:
        return {"unreached": unreached, "status": None, "late": False, "stdout": "", "stderr": ""}
    Path(arguments["hosts_file"]).write_text(arguments["hosts"], encoding="ascii")
    removed, keeps = tuple(arguments["without"]), tuple(arguments["keeps"])
    kept = {
        name: value
        for name, value in env.items()
        if name.startswith(keeps) or not name.startswith(removed)
    }
    kept["PATH"] = os.pathsep.join([arguments["path"], env.get("PATH", os.defpath)])
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        started = subprocess.Popen(
            arguments["argv"],
            env=kept | arguments["environment"],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        status = _wait(started, deadline_s=arguments["deadline_s"])
        output = {"stdout": _text(stdout), "stderr": _text(stderr)}
    return {"unreached": {}, "status": status, "late": status is None, **output}


def _unreached(ssh: list[str], workers: dict[str, str]) -> dict[str, str]:
    """Return ssh's errors by worker; mpirun reports only the first node, without the error."""
    if not ssh or not workers:
        return {}
    with ThreadPoolExecutor(len(workers)) as pool:
        errors = pool.map(lambda address: _try_ssh(ssh, address), workers.values())
    return {name: error for name, error in zip(workers, errors, strict=True) if error is not None}


def _try_ssh(ssh: list[str], address: str) -> str | None:
    """Return ssh's error, or None if the login works."""
    try:
        done = subprocess.run(
            ["ssh", *ssh, "-x", address, "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_SSH_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    message = done.stderr.decode(errors="replace").strip()
    return None if done.returncode == 0 else message or f"status {done.returncode}"


def _wait(started: subprocess.Popen[bytes], *, deadline_s: float) -> int | None:
    try:
        return started.wait(deadline_s)
    except subprocess.TimeoutExpired:
        pass
    # mpirun is a script. Its child process ends the processes on the other nodes.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGTERM)
        ends = time.monotonic() + _LEAVE_S
        while time.monotonic() < ends:
            started.poll()
            os.killpg(started.pid, 0)
            time.sleep(0.05)
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    return None


def _text(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MOST_BYTES))
    return file.read().decode(errors="replace")


def act(arguments: dict[str, Any], *, env: Mapping[str, str]) -> dict[str, Any]:
    """Test a launcher if there is an `argv`, otherwise test this node's connections."""
    return trial(arguments, env=env) if "argv" in arguments else Mesh(arguments).run()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(act(json.load(sys.stdin), env=os.environ)) + "\n")
