"""How a program of `remote/` is run on a node, and what it may answer.

A node can be hostile: each field of an answer is held to its form here, before anyone uses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from payload.errors import AnswerError
from payload.untrusted import RUN_ID, build, checked, parse_json, shown

if TYPE_CHECKING:
    from payload.orchestrate.ssh import Connection

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

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """What a node has and lacks for a run: `look` of place.py."""

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
    """Of the files that were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """`finish` of place.py."""

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
    """Whether a supervisor holds the run there."""
    begun: bool
    """Whether a rank or a supervisor has begun there: without, it cannot know how any ended."""
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
    """What mesh.py found."""

    bind_error: str | None
    port_taken: bool
    pairs: Mapping[str, Pair] = checked(max_items=_MOST_FILES)
    """By peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """An answer that says nothing but that the action is done."""


def remote_argv(program: str) -> list[str]:
    """Return the command that runs a program of `remote/`."""
    # -I: nothing of the login's own Python settings. The name is for who lists the processes.
    return ["python3", "-I", "-c", _START, program]


def remote_stdin(program: str, arguments: Mapping[str, Any]) -> bytes:
    """Return what the command reads: the program, and its arguments as JSON."""
    text = (resources.files("payload.orchestrate.remote") / program).read_bytes()
    return b"%d\n" % len(text) + text + json.dumps(arguments).encode()


def ask(
    connection: Connection,
    program: str,
    answer: type[_T],
    arguments: Mapping[str, Any],
    *,
    timeout_s: float,
) -> _T:
    """Run a program of `remote/` on a node and return its answer.

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
            f"{node}: the program printed no result but {said}. See that python3 works there."
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
