"""Transports of connections to nodes, programs sent through them, one action on all nodes.

A node can be hostile: each field of an answer is held to its form here, before anyone uses it.
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
    """Who we are to the nodes."""

    user: str
    key: Path
    """File of the private key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long each stage of a connection may take."""

    connect_s: float = 10.0
    handshake_s: float = 10.0
    auth_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that ran to its end."""

    status: int
    stdout: bytes
    stderr: bytes


def os_login_command(key: Path) -> str:
    """Return what lets a private key's owner in where Google's OS Login decides; for messages."""
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
            fix="Correct the inventory, or see to the name service.",
        ) from None
    except ConnectionRefusedError:
        raise SshUnreachableError(
            f"{where} refuses connections: the machine is up, sshd is not running there",
            fix="Start it, or wait if the machine is booting.",
        ) from None
    except TimeoutError:
        raise SshUnreachableError(
            f"{where} does not answer within {timeout_s:g} s",
            fix="The machine is off, the address is wrong, or a firewall drops the packets.",
        ) from None
    except OSError as error:
        raise SshUnreachableError(
            f"{where} cannot be reached ({error.strerror})",
            fix="See to the route and the address.",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of an SSH connection to one node."""

    host: str
    """The address or name to connect to."""
    proxy: tuple[str, ...] = ()
    """A program that carries the connection, if there is one."""
    jump: str | None = None
    """The node that the connection goes through; None for a direct one."""


def route_to(node: Node, *, head: Node, access: Access, on_head: bool = False) -> Route:
    """Return the way to a node, from the operator's machine or from the head.

    The one place that knows what `access.kind` means for SSH. Raises ConfigError when the inventory
    does not say where the head is.
    """
    if on_head:
        return Route(host=node.address)
    if node.name != head.name:
        return Route(host=node.address, jump=head.name)
    proxy = tuple(iap_argv(node, access)) if access.kind == "iap" else ()
    return Route(host=node.outside_address, proxy=proxy)


def iap_argv(node: Node, access: Access) -> list[str]:
    """Return the command that carries SSH to `node` through Google's Identity-Aware Proxy.

    Raises ConfigError when the inventory does not say where the node is.
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
    """A running proxy command; `socket` is what it carries."""

    def __init__(self, argv: Sequence[str], *, node: str, env: Mapping[str, str]) -> None:
        """Start it. `node` is for messages. Raises SshUnreachableError."""
        self._argv0 = argv[0]
        self.socket, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115, closed in close()
        login = GoogleLogin.from_env(env)
        # Nobody else may read it, and it goes with the program.
        self._key = tempfile.NamedTemporaryFile(prefix="tileforge-key-")  # noqa: SIM115, likewise
        self._key.write(login.key_text.encode())
        self._key.flush()
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._said,
                # What the operator has set for gcloud itself goes first.
                env=login.for_gcloud(key_file=self._key.name) | dict(env),
                # A terminal's Ctrl-C goes to its whole group, and what it asks goes through here.
                start_new_session=True,
            )
        except OSError as error:
            self.socket.close()
            self._said.close()
            self._key.close()
            raise SshUnreachableError(
                f"{node}: cannot start `{argv[0]}`, which carries the connection "
                f"({error.strerror})",
                fix="Install it, and see that it is on PATH.",
            ) from None
        finally:
            theirs.close()

    def complaint(self) -> str:
        """Return the end of what the program printed on stderr, on one line."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        said = " / ".join([line.strip() for line in lines if line.strip()][-_TAIL_LINES:])
        return f"`{self._argv0}` said: {said}" if said else f"`{self._argv0}` said nothing"

    def ended(self) -> bool:
        """Return whether the program has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the program and see to its end."""
        self.socket.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()
        self._key.close()


NODE_FOLDER = "tileforge"
"""Below the login's home on a node: code, data, weights and runs."""

FOLDER = re.compile(r"(?=.{2,1024}\Z)(?!.*/\.{1,2}(?:/|\Z))(?:/[A-Za-z0-9._@+,=~-]+)+")
"""An absolute path that is a plain word in a shell, in ssh_config and in mpirun's settings."""

_LIBRARY = re.compile(r"[A-Za-z0-9_.+-]{1,255}")
_CONTENT_CHARS = 64 * 2**20
_MOST_FILES = 100_000

# The arguments follow the program on stdin: one word of a command line has 128 KiB at most.
_START = (
    "import sys; i = sys.stdin.buffer; "
    "exec(compile(i.read(int(i.readline())), sys.argv[1], 'exec'))"
)

_SHARED = {"folder": NODE_FOLDER, "ports": [RANK_PORTS.start, RANK_PORTS.stop]}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """Inventory of a node for a run: `look` of look.py."""

    home: str = checked(pattern=FOLDER, wanted="an absolute path of plain characters")
    lacking: tuple[str, ...] = checked(max_items=100)
    """Programs that are not there."""
    tcmalloc: str | None = checked(pattern=_LIBRARY, wanted="a library's name")
    port: int | None = checked(low=1, high=65535)
    """Free; None when none is."""
    running: str | None = checked(pattern=RUN_ID, wanted="a run id")
    """The run that a living supervisor holds."""
    missing: tuple[str, ...] | None = checked(max_items=_MOST_FILES)
    """Files of the payload; None where all of it is there."""
    has: tuple[str, ...] = checked(max_items=_MOST_FILES)
    """Those of the requested files that are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """`finish` of look.py."""

    wrong: tuple[str, ...] = checked(max_items=_MOST_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """`start` of control.py: `pid`, or the other run, or how it ended."""

    pid: int | None = checked(None, low=1)
    running: str | None = checked(None, pattern=RUN_ID, wanted="a run id")
    status: int | None = checked(None, low=-64, high=255)
    said: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a growing file."""

    offset: int = checked(low=0)
    content: str = checked(max_chars=_CONTENT_CHARS)
    """In base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`read` of control.py: what is new of a run on one node."""

    alive: bool
    """True if a supervisor holds the run there."""
    begun: bool
    """True if a rank or a supervisor has begun there: without, it cannot know how any ended."""
    whole: Mapping[str, str] = checked(max_items=_MOST_FILES, max_chars=2**20)
    """The content of small files, by name."""
    more: Mapping[str, Piece] = checked(max_items=_MOST_FILES)
    """By name, of files that grow."""
    left: int = checked(low=0)
    """Bytes that the answer had no room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled:
    """`signal` of control.py."""

    alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """`left` of control.py."""

    pids: tuple[int, ...] = checked(low=1, max_items=_MOST_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The way from one node to another."""

    failed: Mapping[str, str] = checked(max_items=16)
    """The reason, by port."""
    largest_packet: int | None = checked(low=1, high=2**20)
    """None when none arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAnswer:
    """Answer of mesh.py."""

    bind_error: str | None
    port_taken: bool
    pairs: Mapping[str, Pair] = checked(max_items=_MOST_FILES)
    """By peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """An answer that says nothing but that the action is done."""


class Asked(Protocol):
    """Target of a program: a `Connection` to one node."""

    @property
    def node(self) -> Node:
        """The node at the other end."""

    def check_run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> bytes:
        """Run a command that must succeed, and return its stdout."""


def remote_argv(program: str) -> list[str]:
    """Return the command that runs a program of `node/`."""
    # -I: nothing of the login's own Python settings. The name is for who lists the processes.
    return ["python3", "-I", "-c", _START, program]


def remote_stdin(program: str, arguments: Mapping[str, Any]) -> bytes:
    """Return what the command reads: the program, and its arguments as JSON.

    With them go the constants that these programs, which import nothing of ours, share with us.
    """
    text = (resources.files("payload.orchestrate.node") / program).read_bytes()
    return b"%d\n" % len(text) + text + json.dumps({**_SHARED, **arguments}).encode()


def ask(
    connection: Asked,
    program: str,
    answer: type[_T],
    arguments: Mapping[str, Any],
    *,
    timeout_s: float,
) -> _T:
    """Run a program of `node/` on a node and return its answer.

    Raises AnswerError for one that it may not give, and what `check_run` raises.
    """
    text = connection.check_run(
        remote_argv(program), stdin=remote_stdin(program, arguments), timeout_s=timeout_s
    )
    return parse_answer(answer, text, node=connection.node.name)


def parse_answer(answer: type[_T], text: bytes, *, node: str) -> _T:
    """Read the JSON object that a program on a node printed last. Raises AnswerError."""
    # A login shell's greeting may come before it.
    last = text.strip().rpartition(b"\n")[2]
    if not last.startswith(b"{"):
        said = shown(last[:80].decode(errors="replace"))
        raise AnswerError(
            f"{node}: the program printed no result but {said}",
            fix="See that python3 works there.",
        )
    where = f"{node}: its answer"
    return build(
        answer, parse_json(last, where=where, error=AnswerError), where=where, error=AnswerError
    )


def require_known(names: Iterable[str], known: Iterable[str], *, node: str, what: str) -> None:
    """Raise AnswerError when a node names something that it was not asked about."""
    strange = sorted(set(names) - set(known))
    if strange:
        raise AnswerError(f"{node}: its answer: {what} {shown(strange[0])} was not asked for.")


def on_every_node(
    nodes: Sequence[Node], action: Callable[[Node], _T], *, to_the_end: bool = False
) -> dict[str, _T | TileforgeError]:
    """Return the result of `action` on each node by its name, or the error it ended with.

    Waits for all of them: `action` has deadlines of its own. An error that is not ours is a bug and
    is raised once all have ended. After Ctrl-C they go on by themselves; `to_the_end` waits for
    them then, too, which is for what is to be undone afterwards.
    """

    def attempt(node: Node) -> _T | TileforgeError:
        try:
            return action(node)
        except TileforgeError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
        outcomes = [pool.submit(attempt, node) for node in nodes]
        if to_the_end:
            wait(outcomes)  # Ctrl-C ends this; the pool's own end then waits as well
    return {node.name: outcome.result() for node, outcome in zip(nodes, outcomes, strict=True)}


def all_or_raise(outcomes: Mapping[str, _T | TileforgeError], *, what: str) -> dict[str, _T]:
    """Return every node's value. Raises NodesError that names each node that failed."""
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
