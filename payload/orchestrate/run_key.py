"""The key of one run, by which the head reaches the workers: made there, gone with the run."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from payload.errors import ConfigError
from payload.inventory import ClusterInventory, Node
from payload.orchestrate.cluster import Cluster
from payload.orchestrate.fanout import all_or_raise, on_every_node
from payload.orchestrate.keys import render_known_hosts, render_ssh_config
from payload.orchestrate.remote_programs import parse_answer, remote_argv, remote_program
from payload.orchestrate.ssh import Connection
from payload.orchestrate.transfer import put

_ACTION_S = 30.0
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """Where the head has what `ssh -F` needs to reach every node of the run."""

    folder: PurePosixPath

    @property
    def config(self) -> PurePosixPath:
        """The ssh_config, which names the key and the known hosts beside it."""
        return self.folder / "ssh_config"


def install_run_key(
    cluster: Cluster, inventory: ClusterInventory, *, run_id: str, lasts_s: int | None = None
) -> RunKey:
    """Make the key on the head and let every node trust it; the private half stays on the head.

    With `lasts_s` the nodes trust it for so long, even if this operator is killed before removing
    it. Raises NodesError, and what connecting raises; call `remove_run_key` then, too.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"run id {run_id!r}: letters, digits, dots, hyphens and underscores only."
        )
    head = cluster.connect(inventory.head)
    made = _act(head, action="make", run_id=run_id)
    folder = PurePosixPath(made["folder"])
    known_hosts = folder / "known_hosts"
    config = render_ssh_config(
        inventory, key=folder / "id_ed25519", known_hosts=known_hosts, on_head=True
    )
    _put_text(head, render_known_hosts(inventory), known_hosts)
    _put_text(head, config, RunKey(folder=folder).config)

    def trust(node: Node) -> None:
        connection = cluster.connect(node)
        lasts = {} if lasts_s is None else {"lasts_s": lasts_s}
        _act(connection, action="trust", run_id=run_id, public=made["public"], **lasts)

    trusted = on_every_node(inventory.nodes, trust, to_the_end=True)
    all_or_raise(trusted, what="installing the run's key")
    return RunKey(folder=folder)


def remove_run_key(cluster: Cluster, inventory: ClusterInventory, *, run_id: str) -> None:
    """Let no node trust the run's key any more, and delete it; may be repeated.

    Raises NodesError that names the nodes where it may still be.
    """

    def forget(node: Node) -> None:
        _act(cluster.connect(node), action="forget", run_id=run_id)

    all_or_raise(on_every_node(inventory.nodes, forget), what="removing the run's key")


def _act(connection: Connection, **arguments: str | int) -> dict[str, Any]:
    text = connection.check_run(
        remote_argv(arguments), stdin=remote_program("run_key.py"), timeout_s=_ACTION_S
    )
    return parse_answer(text, node=connection.node.name)


def _put_text(connection: Connection, text: str, target: PurePosixPath) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, target.name)
        source.write_text(text, encoding="utf-8")
        put(connection, source, str(target), mode=0o600, timeout_s=_ACTION_S)
