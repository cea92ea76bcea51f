"""Connections to the nodes of a cluster: to the head from here, to the workers through the head."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType

from payload.errors import SshUnreachableError, TileforgeError
from payload.inventory import ClusterInventory, Node
from payload.orchestrate.ssh.connection import Connection, Stream, dial
from payload.orchestrate.ssh.streams import Deadlines, Login, ProxyProcess, iap_argv, open_tcp

_DEFAULT_DEADLINES = Deadlines()


class Cluster:
    """One connection a node, made when it is first asked for; a context manager closes all."""

    def __init__(
        self,
        inventory: ClusterInventory,
        *,
        login: Login,
        env: Mapping[str, str],
        deadlines: Deadlines = _DEFAULT_DEADLINES,
    ) -> None:
        """`env` is what a proxy command runs in."""
        self._inventory = inventory
        self._login = login
        self._env = env
        self._deadlines = deadlines
        self._locks = {node.name: threading.Lock() for node in inventory.nodes}
        self._made: dict[str, Connection | TileforgeError] = {}

    def connect(self, node: Node) -> Connection:
        """The connection to `node`; a failure is remembered and raised again."""
        with self._locks[node.name]:
            if node.name not in self._made:
                try:
                    self._made[node.name] = self._dial(node)
                except TileforgeError as error:
                    self._made[node.name] = error
            made = self._made[node.name]
        if isinstance(made, TileforgeError):
            raise made
        return made

    def close(self) -> None:
        """Close every connection, the head's last."""
        for node in reversed(self._inventory.nodes):
            made = self._made.pop(node.name, None)
            if isinstance(made, Connection):
                made.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _dial(self, node: Node) -> Connection:
        return dial(
            node,
            login=self._login,
            open_stream=lambda: self._open_stream(node),
            deadlines=self._deadlines,
        )

    def _open_stream(self, node: Node) -> Stream:
        timeout_s = self._deadlines.connect_s
        head, access = self._inventory.head, self._inventory.access
        if node.name != head.name:
            try:
                through = self.connect(head)
            except TileforgeError:
                raise SshUnreachableError(
                    f"{node.name}: not tried, as the way to it is through {head.name}, which "
                    "cannot be used."
                ) from None
            return through.open_channel_to(node, timeout_s=timeout_s)
        if access.kind == "iap":
            return ProxyProcess(iap_argv(node, access), node=node.name, env=self._env)
        return open_tcp(node, timeout_s=timeout_s)
