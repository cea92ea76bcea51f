"""An attempt to start something on a cluster: its claim on the head, and the key that it makes.

The key is how the head reaches the workers. It is made there for one attempt, and goes with it: by
whoever sees that nothing will use it again.
"""

from __future__ import annotations

import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from payload.errors import AnswerError, ConfigError, PreflightError
from payload.hints import command
from payload.inventory import ClusterInventory, Node
from payload.orchestrate.cluster import Cluster
from payload.orchestrate.fanout import all_or_raise, on_every_node
from payload.orchestrate.keys import render_known_hosts, render_ssh_config
from payload.orchestrate.remote_programs import (
    Nothing,
    ask,
    parse_answer,
    remote_argv,
    remote_stdin,
)
from payload.orchestrate.ssh import Connection
from payload.orchestrate.transfer import put
from payload.untrusted import RUN_ID, build, checked, parse_json

_ACTION_S = 30.0
_T = TypeVar("_T")
# Somebody else's supervisor may be starting, for which the head has 30 s.
_CLAIM_S = 60.0
_RETRY_S = 2.0

_KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_PUBLIC = re.compile(r"ssh-ed25519 [A-Za-z0-9+/]{60,80}={0,2} tileforge-run:[A-Za-z0-9._-]{1,120}")
_ORIGIN = re.compile(r"[0-9A-Fa-f.:]{2,45}")
_FOLDER = re.compile(r"/[^\x00-\x1f\x7f\"\\$ ]{1,1000}/\.ssh/tileforge/[A-Za-z0-9._-]{1,120}")


class HeadBusyError(PreflightError):
    """Somebody else has the claim on the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What came of claiming the head."""

    name: str
    """The attempt's, which its key gets: nobody else's has it."""
    running: str | None
    """The run that is under way, so that the claim is not had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """Where the head has what `ssh -F` needs to reach every node of the run."""

    folder: PurePosixPath

    @property
    def config(self) -> PurePosixPath:
        """The ssh_config, which names the key and the known hosts beside it."""
        return self.folder / "ssh_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claimed:
    """What the head answers to a claim, see remote/control.py."""

    claim: bool
    running: str | None = checked(pattern=RUN_ID, wanted="a run's name")
    held: str | None = None
    """The text that the holder has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    run_id: str = checked("?", pattern=RUN_ID, wanted="a run's name")
    origin: str = checked("?", pattern=_ORIGIN, wanted="an address")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    folder: str = checked(pattern=_FOLDER, wanted="a folder of ~/.ssh/tileforge")
    public: str = checked(pattern=_PUBLIC, wanted="a public key of a run")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    names: tuple[str, ...] = checked(pattern=_KEY_NAME, wanted="a key's name", max_items=10_000)


@contextmanager
def claimed(
    cluster: Cluster,
    inventory: ClusterInventory,
    *,
    run_dir: PurePosixPath,
    say: Callable[[str], None],
    patience_s: float = _CLAIM_S,
) -> Iterator[Claim]:
    """Within it nobody else starts a run or a trial on this cluster.

    The claim ends with the connection, so also with this process. Waits for somebody else's, as
    long as `patience_s`. Raises ConfigError for a run's name that is none, and PreflightError.
    """
    if not RUN_ID.fullmatch(run_dir.name):
        raise ConfigError(
            f"run id {run_dir.name!r}: letters, digits, dots, hyphens and underscores only."
        )
    name = f"{run_dir.name}.{secrets.token_hex(4)}"
    ends = time.monotonic() + patience_s
    has_told = False
    while True:
        with _asked(cluster.connect(inventory.head), run_dir, name) as answer:
            if answer.claim or answer.running is not None:
                yield Claim(name=name, running=answer.running)
                return
        held = _words(answer.held, head=inventory.head.name)
        if time.monotonic() > ends:
            raise HeadBusyError(
                f"{held}, so nothing was started. Wait until it runs, and follow it with: "
                + command("orchestrate", "attach")
            )
        if not has_told:
            say(f"{held}: waiting for that")
            has_told = True
        time.sleep(_RETRY_S)


def install_run_key(
    cluster: Cluster, inventory: ClusterInventory, *, name: str, lasts_s: float
) -> RunKey:
    """Make the key on the head and let every node trust it; the private half stays on the head.

    The nodes trust it for `lasts_s`, and from the head's address alone. Raises NodesError, and what
    connecting raises; call `remove_run_key` then, too.
    """
    head = inventory.head
    made = _act(cluster.connect(head), _Made, action="make", name=name)
    folder = PurePosixPath(made.folder)
    if folder.name != name or not made.public.endswith(f":{name}"):
        raise AnswerError(f"{head.name}: it made another key than {name!r}. Look at the machine.")
    known_hosts = folder / "known_hosts"
    config = render_ssh_config(
        inventory, key=folder / "id_ed25519", known_hosts=known_hosts, on_head=True
    )
    _put_text(cluster.connect(head), render_known_hosts(inventory), known_hosts)
    _put_text(cluster.connect(head), config, RunKey(folder=folder).config)

    def trust(node: Node) -> None:
        _act(
            cluster.connect(node),
            Nothing,
            action="trust",
            public=made.public,
            head=head.address,
            is_head=node.name == head.name,
            lasts_s=lasts_s,
        )

    trusted = on_every_node(inventory.nodes, trust, to_the_end=True)
    all_or_raise(trusted, what="installing the run's key")
    return RunKey(folder=folder)


def remove_run_key(cluster: Cluster, inventory: ClusterInventory, *names: str) -> None:
    """Let no node trust these keys any more, and delete them; may be repeated.

    For whose attempt it is, or for keys that are dead. Raises NodesError that names the nodes where
    they may still be.
    """

    def forget(node: Node) -> None:
        _act(cluster.connect(node), Nothing, action="forget", names=list(names))

    all_or_raise(on_every_node(inventory.nodes, forget), what="removing the run's key")


def remove_dead_keys(cluster: Cluster, inventory: ClusterInventory) -> Sequence[str]:
    """Remove every key that no attempt uses or will use; returns the names of them.

    They are left by operators who were killed, or by runs that have ended. The head says which of
    those that it made: one that is in use stays, whoever asks, and one that another head made is
    left to that head and to its own end. Raises NodesError, as `remove_run_key`.
    """
    asked = on_every_node(inventory.nodes, lambda node: _names(cluster.connect(node), "names"))
    found = {name for got in asked.values() if isinstance(got, tuple) for name in got}
    dead: Sequence[str] = ()
    if found:
        dead = _names(cluster.connect(inventory.head), "dead", names=sorted(found))
    dead = sorted(found & set(dead))
    if dead:
        remove_run_key(cluster, inventory, *dead)
    all_or_raise(asked, what="removing the run's key")
    return dead


def _names(connection: Connection, action: str, **arguments: Any) -> tuple[str, ...]:
    return _act(connection, _Names, action=action, timeout_s=2 * _ACTION_S, **arguments).names


@contextmanager
def _asked(connection: Connection, run_dir: PurePosixPath, name: str) -> Iterator[_Claimed]:
    arguments = {"action": "claim", "run_dir": str(run_dir), "name": name}
    with connection.listening(
        remote_argv("control.py"),
        stdin=remote_stdin("control.py", arguments),
        timeout_s=_CLAIM_S,
    ) as line:
        yield parse_answer(_Claimed, line, node=connection.node.name)


def _words(held: str | None, *, head: str) -> str:
    """Who has the claim; what the holder has left may be half written, or anything."""
    try:
        holder = build(_Holder, parse_json(held or "{}", where=head), where=head)
    except ConfigError:
        holder = _Holder()
    return f"{head}: somebody (from {holder.origin}) is starting {holder.run_id}"


def _act(
    connection: Connection, answer: type[_T], *, timeout_s: float = _ACTION_S, **arguments: Any
) -> _T:
    return ask(connection, "run_key.py", answer, arguments, timeout_s=timeout_s)


def _put_text(connection: Connection, text: str, target: PurePosixPath) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, target.name)
        source.write_text(text, encoding="utf-8")
        put(connection, source, str(target), mode=0o600, timeout_s=_ACTION_S)
