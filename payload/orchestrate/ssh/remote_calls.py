"""Routes to nodes, runs programs on nodes and parses the responses, also in parallel.

A node can be hostile, so every field of a response is validated before it is used.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, TypeVar

from payload.core.errors import (
    AnswerError,
    ConfigError,
    NodesError,
    SshUnreachableError,
    TileforgeError,
)
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import RUN_ID
from payload.core.validation.records import build
from payload.machines.inventory import RANK_PORTS, Access, Node
from payload.storage.google_environment_login import GoogleLogin


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """The user and key for logins on the nodes."""

    user: str
    key: Path
    """File of the private key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Time limits for each stage of a connection."""

    connect_s: float = 10.0
    handshake_s: float = 10.0
    auth_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Result of a finished command."""

    status: int
    stdout: bytes
    stderr: bytes


def os_login_command(key: Path) -> str:
    """Return the command, for messages, that adds a key to an OS Login account."""
    return f"gcloud compute os-login ssh-keys add --key-file={key}.pub"


_KILL_AFTER_S = 5.0
_TAIL_LINES = 3


def open_tcp(node: Node, *, timeout_s: float) -> socket.socket:
    """Return a connection to the node's SSH port. Raises SshUnreachableError."""
    address = (node.outside_address, node.ssh_port)
    where = f"{node.name}: {address[0]} port {address[1]}"
    try:
        return socket.create_connection(address, timeout=timeout_s)
    except socket.gaierror as error:
        raise SshUnreachableError(
            f"{node.name}: the name {address[0]!r} does not resolve ({error.strerror})",
            fix="Correct the inventory, or check DNS.",
        ) from None
    except ConnectionRefusedError:
        raise SshUnreachableError(
            f"{where} refuses connections: the machine is up, but sshd is not running",
            fix="Start sshd, or wait if the machine is booting.",
        ) from None
    except TimeoutError:
        raise SshUnreachableError(
            f"{where} does not respond within {timeout_s:g} s",
            fix="The machine is off, the address is wrong, or a firewall drops the packets.",
        ) from None
    except OSError as error:
        raise SshUnreachableError(
            f"{where} cannot be reached ({error.strerror})",
            fix="Check the network route and the address.",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The route of an SSH connection to one node."""

    host: str
    """The address or name to connect to."""
    proxy: tuple[str, ...] = ()
    """The proxy command; empty without a proxy."""
    jump: str | None = None
    """The node that the connection passes through; None for a direct connection."""


def route_to(node: Node, *, head: Node, access: Access, on_head: bool = False) -> Route:
    """Return the route to a node, from the operator's machine or from the head.

    The only function that interprets `access.kind` for SSH. Raises ConfigError if the inventory
    lacks the head's location.
    """
    if on_head:
        return Route(host=node.address)
    if node.name != head.name:
        return Route(host=node.address, jump=head.name)
    proxy = tuple(iap_argv(node, access)) if access.kind == "iap" else ()
    return Route(host=node.outside_address, proxy=proxy)


def iap_argv(node: Node, access: Access) -> list[str]:
    """Return the command that tunnels SSH to `node` through Google's Identity-Aware Proxy.

    Raises ConfigError if the inventory does not give the node's location.
    """
    if not access.project or not node.zone:
        missing = "access.project" if not access.project else f"the zone of {node.name}"
        raise ConfigError(
            f"inventory: access kind 'iap' needs {missing}. Write the inventory again."
        )
    return [
        "gcloud",
        "compute",
        "start-iap-tunnel",
        node.name,
        str(node.ssh_port),
        "--listen-on-stdin",
        f"--project={access.project}",
        f"--zone={node.zone}",
        "--verbosity=warning",
    ]


class ProxyProcess:
    """A running proxy command; `socket` is the tunnelled connection."""

    def __init__(self, argv: Sequence[str], *, node: str, env: Mapping[str, str]) -> None:
        """Start the command; `node` is the name in messages. Raises SshUnreachableError."""
        self._argv0 = argv[0]
        self.socket, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115, closed in close()
        login = GoogleLogin.from_env(env)
        # Only this user can read the file, and close() deletes it.
        self._key = tempfile.NamedTemporaryFile(prefix="tileforge-key-")  # noqa: SIM115, likewise
        self._key.write(login.key_text.encode())
        self._key.flush()
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._stderr,
                # The operator's own settings for gcloud have priority.
                env=login.for_gcloud(key_file=self._key.name) | dict(env),
                # Ctrl-C on the terminal must not kill the command, because this process still uses
                # the tunnel.
                start_new_session=True,
            )
        except OSError as error:
            self.socket.close()
            self._stderr.close()
            self._key.close()
            raise SshUnreachableError(
                f"{node}: cannot start the proxy command `{argv[0]}` ({error.strerror})",
                fix="Install it, and check that it is on PATH.",
            ) from None
        finally:
            theirs.close()

    def complaint(self) -> str:
        """Return the last lines that the command printed on stderr, as one line."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        tail = " / ".join([line.strip() for line in lines if line.strip()][-_TAIL_LINES:])
        return f"`{self._argv0}` printed: {tail}" if tail else f"`{self._argv0}` printed no error"

    def ended(self) -> bool:
        """Return whether the command has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Terminate the command and wait for it."""
        self.socket.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()
        self._key.close()


NODE_FOLDER = "tileforge"
"""Folder in the login's home on a node, with code, data, weights and runs."""

FOLDER = re.compile(r"(?=.{2,1024}\Z)(?!.*/\.{1,2}(?:/|\Z))(?:/[A-Za-z0-9._@+,=~-]+)+")
"""An absolute path that a shell, ssh_config and mpirun's settings accept without quotes."""

_LIBRARY = re.compile(r"[A-Za-z0-9_.+-]{1,255}")
_CONTENT_CHARS = 64 * 2**20
_MOST_FILES = 100_000

# The arguments follow the program on stdin, because a command-line argument is limited to 128 KiB.
_START = (
    "import sys; i = sys.stdin.buffer; "
    "exec(compile(i.read(int(i.readline())), sys.argv[1], 'exec'))"
)

_SHARED = {"folder": NODE_FOLDER, "ports": [RANK_PORTS.start, RANK_PORTS.stop]}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """State of a node before a run: the response to action `look` in look.py."""

    home: str = checked(pattern=FOLDER, wanted="an absolute path of plain characters")
    lacking: tuple[str, ...] = checked(max_items=100)
    """Programs that the node lacks."""
    tcmalloc: str | None = checked(pattern=_LIBRARY, wanted="a library's name")
    port: int | None = checked(low=1, high=65535)
    """A free port; None if no port is free."""
    running: str | None = checked(pattern=RUN_ID, wanted="a run id")
    """The run that has a living supervisor, or None."""
    missing: tuple[str, ...] | None = checked(max_items=_MOST_FILES)
    """Missing or changed files of the payload; None if the node has this version."""
    has: tuple[str, ...] = checked(max_items=_MOST_FILES)
    """The requested files that exist on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The response to action `finish` in look.py."""

    wrong: tuple[str, ...] = checked(max_items=_MOST_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The response to action `start` in control.py: a `pid`, the run in progress, or an exit
    status."""

    pid: int | None = checked(None, low=1)
    running: str | None = checked(None, pattern=RUN_ID, wanted="a run id")
    status: int | None = checked(None, low=-64, high=255)
    said: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New bytes of a growing file."""

    offset: int = checked(low=0)
    content: str = checked(max_chars=_CONTENT_CHARS)
    """The bytes in base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The response to action `read` in control.py: new data of a run on one node."""

    alive: bool
    """True if a supervisor of the run is alive on the node."""
    begun: bool
    """True if a rank or the supervisor has started on the node; if False, there are no exit
    statuses."""
    whole: Mapping[str, str] = checked(max_items=_MOST_FILES, max_chars=2**20)
    """Contents of small files, by name."""
    more: Mapping[str, Piece] = checked(max_items=_MOST_FILES)
    """New bytes of growing files, by name."""
    left: int = checked(low=0)
    """Number of bytes that did not fit into the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled:
    """The response to action `signal` in control.py."""

    alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The response to action `left` in control.py: the run's processes that are still running."""

    pids: tuple[int, ...] = checked(low=1, max_items=_MOST_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Connectivity from one node to one peer."""

    failed: Mapping[str, str] = checked(max_items=16)
    """Reasons of failed connections, by port number."""
    largest_packet: int | None = checked(low=1, high=2**20)
    """Size in bytes of the largest packet that arrived, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAnswer:
    """The response of mesh.py."""

    bind_error: str | None
    port_taken: bool
    pairs: Mapping[str, Pair] = checked(max_items=_MOST_FILES)
    """Connectivity by peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """An empty response, which confirms that the action was completed."""


class RemoteShell(Protocol):
    """The methods of `Connection` that are needed to run a program."""

    @property
    def node(self) -> Node:
        """The connected node."""

    def check_run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> bytes:
        """Run a command and return its stdout; raise if it fails."""


def remote_argv(program: str) -> list[str]:
    """Return the command that reads a program of `node/` from stdin and runs it."""
    # -I ignores the login's Python settings. The program's name makes process listings readable.
    return ["python3", "-I", "-c", _START, program]


def remote_stdin(program: str, arguments: Mapping[str, Any]) -> bytes:
    """Return the command's stdin: the program, and its arguments as JSON.

    The arguments include shared constants, because these programs cannot import the payload.
    """
    text = (resources.files("payload.orchestrate.node") / program).read_bytes()
    return b"%d\n" % len(text) + text + json.dumps({**_SHARED, **arguments}).encode()


def ask(
    connection: RemoteShell,
    program: str,
    answer: type[_T],
    arguments: Mapping[str, Any],
    *,
    timeout_s: float,
) -> _T:
    """Run a program of `node/` on a node and return its response.

    Raises AnswerError for an invalid response, and the errors of `check_run`.
    """
    text = connection.check_run(
        remote_argv(program), stdin=remote_stdin(program, arguments), timeout_s=timeout_s
    )
    return parse_answer(answer, text, node=connection.node.name)


def parse_answer(answer: type[_T], text: bytes, *, node: str) -> _T:
    """Parse the JSON object on the last line that a program on a node printed.

    Raises AnswerError.
    """
    # A login shell's greeting can precede the line.
    last = text.strip().rpartition(b"\n")[2]
    if not last.startswith(b"{"):
        output = shown(last[:80].decode(errors="replace"))
        raise AnswerError(
            f"{node}: the program printed {output} instead of a result",
            fix="Check that python3 works on the node.",
        )
    where = f"{node}: response"
    return build(
        answer, parse_json(last, where=where, error=AnswerError), where=where, error=AnswerError
    )


def require_known(names: Iterable[str], known: Iterable[str], *, node: str, what: str) -> None:
    """Raise AnswerError if a node's response contains a name that was not requested."""
    strange = sorted(set(names) - set(known))
    if strange:
        raise AnswerError(f"{node}: response: {what} {shown(strange[0])} was not requested.")


def on_every_node(
    nodes: Sequence[Node], action: Callable[[Node], _T], *, to_the_end: bool = False
) -> dict[str, _T | TileforgeError]:
    """Run `action` on all nodes in parallel; return each result or TileforgeError by node name.

    Wait for all actions, so `action` must have its own deadlines. Any exception that is not a
    TileforgeError is a bug and is raised after all actions have ended. Ctrl-C ends the wait,
    and actions continue in the background. With `to_the_end`, the actions end first: set it for
    actions that must be undone afterwards.
    """

    def attempt(node: Node) -> _T | TileforgeError:
        try:
            return action(node)
        except TileforgeError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
        outcomes = [pool.submit(attempt, node) for node in nodes]
        if to_the_end:
            wait(outcomes)  # Ctrl-C ends this wait; leaving the pool then waits again
    return {node.name: outcome.result() for node, outcome in zip(nodes, outcomes, strict=True)}


def all_or_raise(outcomes: Mapping[str, _T | TileforgeError], *, what: str) -> dict[str, _T]:
    """Return every node's value. Raises NodesError with the name of each node that failed."""
    values: dict[str, _T] = {}
    failures: dict[str, TileforgeError] = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, TileforgeError):
            failures[name] = outcome
        else:
            values[name] = outcome
    if failures:
        raise NodesError(what, failures)
    return values
