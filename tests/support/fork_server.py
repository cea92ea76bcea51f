"""A process that has imported torch and the payload, and runs programs in forks.

`server_name` starts it once a session. tests.support.forked requests the forks. Training in the
forks uses a short calibration.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import payload
from tests.support.forked import read_at_start
from tests.support.sessions import kill_session

_LIBRARIES = (
    "torch",
    "safetensors.torch",
    "tokenizers",
    "accelerate",
    "transformers",
    "rich.table",
)
_environment = dict(os.environ)
_LIMITS = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE")


def remember_environment() -> None:
    """Record the variables that servers start with; tests change some, but share one server."""
    _environment.clear()
    _environment.update(os.environ)


@functools.cache
def server_name(*libraries: str, **environment: str) -> str:
    """Start a server, which ends with this process, and return its name.

    Both arguments are additions: to its imports, and to the variables of the tests.
    """
    name = f"tileforge-tests-{os.getpid()}-{secrets.token_hex(8)}"
    command = [sys.executable, "-m", "tests.support.fork_server", name, *libraries]
    repo = Path(__file__).parents[2]
    started = subprocess.Popen(
        command,
        cwd=repo,
        env={**_environment, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert started.stdin is not None and started.stdout is not None
    assert started.stdout.readline() == b"listening\n"
    atexit.register(_end, started)
    return name


def _end(started: subprocess.Popen[bytes]) -> None:
    """End the server, and wait for it."""
    with started:
        pass


def main(name: str, *libraries: str) -> None:
    """Fork for each connection until stdin ends."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{name}")
    listening.listen(64)
    sys.stdout.write("listening\n")  # before its imports have finished
    sys.stdout.flush()
    with warnings.catch_warnings(action="ignore"):
        for each in (*_LIBRARIES, *libraries, *_modules()):
            importlib.import_module(each)
    importlib.import_module("tests.support.brief_calibration").calibrate_briefly()
    gc.freeze()  # a collection in a fork would copy every imported page
    forks: dict[int, _Fork] = {}
    while True:
        watched = [descriptor for fork in forks.values() for descriptor in fork.watched]
        ready, _, _ = select.select([0, listening, *watched], [], [])
        if 0 in ready:
            os._exit(0)  # an orderly shutdown takes seconds
        if listening in ready:
            with contextlib.suppress(OSError):  # the client has ended
                _Fork.of(listening.accept()[0], forks)
        for number, fork in list(forks.items()):
            if fork.ended in ready:
                fork.report()
                del forks[number]
            elif fork.connection in ready:
                fork.pass_on()


@dataclass(slots=True)
class _Fork:
    """A running program."""

    process: int
    ended: int
    """Its pidfd, which is ready when the program has ended."""
    connection: socket.socket
    leads: bool
    """True if signals go to its whole process group, and SIGKILL to its whole session."""
    killed: bool = False

    @classmethod
    def of(cls, connection: socket.socket, forks: dict[int, _Fork]) -> None:
        """Run the client's program in a fork, and add it to `forks`."""
        connection.sendall(f"{json.dumps(read_at_start(os.environ))}\n".encode())
        text, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        try:
            while text and not text.endswith(b"\n"):
                more = connection.recv(1 << 16)
                text = text + more if more else b""
            if not text:
                connection.close()
                return
            request = json.loads(text)
            process = os.fork()
            if process == 0:
                if request["group"]:
                    os.setsid()
                _become(request, descriptors, _peer(connection))
        finally:
            for each in descriptors:
                os.close(each)
        while request["group"] and os.getsid(process) != process:
            time.sleep(0.0001)  # until then, there is no group to signal
        forks[process] = cls(process, os.pidfd_open(process), connection, request["group"])

    @property
    def watched(self) -> list[int | socket.socket]:
        """Return the descriptors for select."""
        return [self.ended] if self.killed else [self.ended, self.connection]

    def pass_on(self) -> None:
        """Forward the client's signals to the program; if it has ended, kill the program."""
        try:
            numbers = self.connection.recv(64)
        except OSError:
            numbers = b""
        self.killed = not numbers
        for number in numbers or [signal.SIGKILL]:
            if self.leads and number == signal.SIGKILL:
                kill_session(self.process)
            elif self.leads:
                os.killpg(self.process, number)
            else:
                signal.pidfd_send_signal(self.ended, number)

    def report(self) -> None:
        """Send the client how the program ended."""
        _, status = os.waitpid(self.process, 0)
        os.close(self.ended)
        with contextlib.suppress(OSError):
            self.connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        self.connection.close()


def _modules() -> Iterator[str]:
    """Yield the names of the payload's modules; modules that are programs run in the forks."""
    for found in pkgutil.walk_packages(payload.__path__, "payload."):
        if not found.name.endswith(".__main__"):
            yield found.name


def _peer(connection: socket.socket) -> int:
    """Return the process id of the client."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[0])


def _become(request: Mapping[str, Any], descriptors: list[int], peer: int) -> NoReturn:
    """Run the program in this process as Python does."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.closerange(3, 256)
    _open_streams()
    os.sched_setaffinity(0, os.sched_getaffinity(peer))
    for name in _LIMITS:
        limit = getattr(resource, name)
        resource.setrlimit(limit, resource.prlimit(peer, limit))
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    status = _run(request["words"])
    # As at every exit of Python: the threads of executors wait for it before they can be joined.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _open_streams() -> None:
    """Open the standard streams as Python does; the server's streams cache if they are seekable."""
    for number, name, mode, buffering in (
        (0, "stdin", "r", -1),
        (1, "stdout", "w", -1),
        (2, "stderr", "w", 1),
    ):
        old = getattr(sys, name)
        new = os.fdopen(number, mode, buffering, old.encoding, old.errors, closefd=False)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _run(arguments: list[str]) -> int:
    """Run `-m MODULE` or a file and return the exit status."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
