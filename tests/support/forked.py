"""Runs a Python program in a fork of tests.support.fork_server: forked.py -m MODULE | FILE ARGS.

Importing torch takes 1.5 s of processor time, most of a short run. This process represents the
fork: it forwards signals, and each ends with the other. Without a server, or if a variable that is
read at start-up differs, it becomes Python.

`python -I -S` starts it in milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping

VARIABLE = "TILEFORGE_TESTS_FORK_SERVER"
"""Name of the server in the abstract namespace of Unix sockets."""
GROUP = "TILEFORGE_TESTS_FORK_GROUP"
"""If set, the fork leads a session: signals go to its process group, SIGKILL to the session."""
_READ_AT_START = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "MKL_"),
    *("TORCH_", "HF_", "TRANSFORMERS_", "HOME", "XDG_", "LANG", "LC_"),
)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the interpreter or a library reads at load time."""
    return {name: text for name, text in environment.items() if name.startswith(_READ_AT_START)}


def main() -> None:
    """Run the program and end with its exit status."""
    environment = dict(os.environ)
    name = environment.pop(VARIABLE, None)
    group = environment.pop(GROUP, None) is not None
    server = _connected(name, environment) if name else None
    if server is None:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    mask = os.umask(0)
    os.umask(mask)
    folder = os.getcwd()  # noqa: PTH109
    request = {"words": sys.argv[1:], "env": environment, "folder": folder, "umask": mask}
    request["group"] = group
    line = f"{json.dumps(request)}\n".encode()
    sent = socket.send_fds(server, [line], [0, 1, 2])
    if sent < len(line):
        # Not with an empty rest: a short program may have ended by now, and the server hung up.
        server.sendall(line[sent:])

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # the fork has ended
            server.sendall(bytes([number]))

    for each in _PASSED_ON:
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, pass_on)
    answer = server.makefile().readline()
    status = int(answer) if answer else -signal.SIGKILL
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _connected(name: str, environment: Mapping[str, str]) -> socket.socket | None:
    """Connect to the server, if its forks have the same start-up variables."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(f"\0{name}")
    except OSError:
        return None
    of_server = json.loads(server.makefile().readline())
    return server if of_server == read_at_start(environment) else None


if __name__ == "__main__":
    main()
