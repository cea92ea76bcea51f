"""SSH keys of runs: created on the head, authorized on every node, and revoked afterwards."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from payload.core.errors import AnswerError
from payload.core.validation.fields import checked
from payload.machines.inventory import Node
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.files import put
from payload.orchestrate.ssh.remote_calls import Nothing, all_or_raise, ask, on_every_node
from payload.orchestrate.ssh.ssh_config import render_known_hosts, render_ssh_config
from payload.orchestrate.ssh.start_claim import KEY_NAME

_ACTION_S = 30.0
_T = TypeVar("_T")
_PUBLIC = re.compile(r"ssh-ed25519 [A-Za-z0-9+/]{60,80}={0,2} tileforge-run:[A-Za-z0-9._-]{1,120}")
_FOLDER = re.compile(r"/[^\x00-\x1f\x7f\"\\$ ]{1,1000}/\.ssh/tileforge/[A-Za-z0-9._-]{1,120}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """A folder on the head with the files that `ssh -F` needs to reach every node of the run."""

    folder: PurePosixPath

    @property
    def config(self) -> PurePosixPath:
        """The ssh_config, which refers to the key and the known_hosts next to it."""
        return self.folder / "ssh_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Created:
    folder: str = checked(pattern=_FOLDER, wanted="a folder of ~/.ssh/tileforge")
    public: str = checked(pattern=_PUBLIC, wanted="a public key of a run")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    names: tuple[str, ...] = checked(pattern=KEY_NAME, wanted="a key's name", max_items=10_000)


def install_run_key(cluster: Cluster, *, name: str, lasts_s: float) -> RunKey:
    """Create the key on the head, and authorize it on every node.

    The private key stays on the head. The nodes accept the key for `lasts_s` seconds, and only from
    the head's address. Raises NodesError, and errors of the connections. Call `remove_run_key` even
    after an error.
    """
    inventory, head = cluster.inventory, cluster.inventory.head
    made = _act(cluster.connect(head), _Created, action="make", name=name)
    folder = PurePosixPath(made.folder)
    if folder.name != name or not made.public.endswith(f":{name}"):
        raise AnswerError(
            f"{head.name}: created another key than {name!r}. Inspect or replace the machine."
        )
    known_hosts = folder / "known_hosts"
    config = render_ssh_config(
        inventory.nodes,
        user=inventory.ssh_user,
        access=inventory.access,
        key=folder / "id_ed25519",
        known_hosts=known_hosts,
        on_head=True,
    )
    _put_text(cluster.connect(head), render_known_hosts(inventory.nodes), known_hosts)
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


def remove_run_key(cluster: Cluster, *names: str) -> None:
    """Revoke these keys on every node and delete the key files; idempotent.

    The head keeps a key's name until every worker has revoked it, so that `remove_stale_keys` can
    retry. Pass only names of the caller's own attempt or of stale keys. Raises NodesError that
    names the nodes where the keys can still be authorized.
    """

    def forget(node: Node, *, keeps_names: bool = True) -> None:
        connection = cluster.connect(node)
        _act(connection, Nothing, action="forget", names=list(names), keeps_names=keeps_names)

    inventory = cluster.inventory
    all_or_raise(on_every_node(inventory.nodes, forget), what="removing the run's key")
    head = on_every_node([inventory.head], partial(forget, keeps_names=False))
    all_or_raise(head, what="removing the run's key")


def remove_stale_keys(cluster: Cluster) -> Sequence[str]:
    """Remove all stale keys of this head and return their names.

    Stale keys are left by killed operators or ended runs. The head lists the keys that it created
    and that are not in use. Keys created by another head are kept until they expire. Raises
    NodesError like `remove_run_key`.
    """
    inventory = cluster.inventory
    listed = on_every_node(inventory.nodes, lambda node: _names(cluster.connect(node), "names"))
    found = {name for got in listed.values() if isinstance(got, tuple) for name in got}
    dead: Sequence[str] = ()
    if found:
        dead = _names(cluster.connect(inventory.head), "dead", names=sorted(found))
    dead = sorted(found & set(dead))
    if dead:
        remove_run_key(cluster, *dead)
    all_or_raise(listed, what="removing the run's key")
    return dead


def _names(connection: Connection, action: str, **arguments: Any) -> tuple[str, ...]:
    return _act(connection, _Names, action=action, timeout_s=2 * _ACTION_S, **arguments).names


def _act(
    connection: Connection, answer: type[_T], *, timeout_s: float = _ACTION_S, **arguments: Any
) -> _T:
    return ask(connection, "run_key.py", answer, arguments, timeout_s=timeout_s)


def _put_text(connection: Connection, text: str, target: PurePosixPath) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, target.name)
        source.write_text(text, encoding="utf-8")
        put(connection, source, str(target), mode=0o600, timeout_s=_ACTION_S)
