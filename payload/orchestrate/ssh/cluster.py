"""Connects to a cluster's nodes through the head, with the operator's key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from payload.core.errors import SshAuthError, SshUnreachableError, TileforgeError
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.ssh.authentication import dial
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.paramiko_transport import Stream
from payload.orchestrate.ssh.remote_calls import (
    Deadlines,
    Login,
    ProxyProcess,
    open_tcp,
    os_login_command,
    route_to,
)
from payload.orchestrate.ssh.ssh_config import write_ssh_files
from payload.stack.operator_key_file import operator_key_path, require_private, write_public_half

_DEFAULT_DEADLINES = Deadlines()


class Cluster:
    """Opens one connection per node on first use; a context manager closes all of them."""

    def __init__(
        self,
        inventory: ClusterInventory,
        *,
        login: Login,
        env: Mapping[str, str],
        deadlines: Deadlines = _DEFAULT_DEADLINES,
        news: Callable[[], str] = lambda: "",
    ) -> None:
        """Store the arguments without connecting; `env` is the environment of proxy commands.

        `news` is called if the connection to the head fails. If the head's address changed since
        the inventory was written, `news` returns a message, otherwise an empty string.
        """
        self.inventory = inventory
        self._news = news
        self._login = login
        self._env = env
        self._deadlines = deadlines
        self._locks = {node.name: threading.Lock() for node in inventory.nodes}
        self._made: dict[str, Connection | TileforgeError] = {}

    def connect(self, node: Node) -> Connection:
        """Return the connection to the node that has the name of `node` in the inventory.

        A failure is cached and raised again by later calls.
        """
        node = next(each for each in self.inventory.nodes if each.name == node.name)
        with self._locks[node.name]:
            if node.name not in self._made:
                try:
                    self._made[node.name] = self._dial(node)
                except TileforgeError as error:
                    self._made[node.name] = self._with_news(node, error)
            made = self._made[node.name]
        if isinstance(made, TileforgeError):
            raise made
        return made

    def close(self) -> None:
        """Close every connection, and the head's connection last."""
        for node in reversed(self.inventory.nodes):
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

    def _with_news(self, node: Node, error: TileforgeError) -> TileforgeError:
        """Return `error`, or a retryable error if the head's address has changed."""
        news = self._news() if node.name == self.inventory.head.name else ""
        return SshUnreachableError(f"{node.name}: {news} ({error})") if news else error

    def _dial(self, node: Node) -> Connection:
        return dial(
            node,
            login=self._login,
            open_stream=lambda: self._open_stream(node),
            deadlines=self._deadlines,
        )

    def _open_stream(self, node: Node) -> Stream:
        timeout_s = self._deadlines.connect_s
        route = route_to(node, head=self.inventory.head, access=self.inventory.access)
        if route.jump is not None:
            try:
                through = self.connect(self.inventory.head)
            except TileforgeError:
                raise SshUnreachableError(
                    f"{node.name}: not tried, because it is reached through {route.jump}, which "
                    "failed."
                ) from None
            return through.open_channel_to(node, timeout_s=timeout_s)
        if route.proxy:
            return ProxyProcess(route.proxy, node=node.name, env=self._env)
        return open_tcp(node, timeout_s=timeout_s)


def operator_key(inventory: ClusterInventory, *, given: Path | None) -> Path:
    """Return the operator's key file; write the files for `ssh -F` next to the cluster's key."""
    own = operator_key_path(Path.cwd(), cluster=inventory.cluster)
    if given is None and not own.exists():
        public = write_public_half(own)
        os_login = ""
        if inventory.source == "pulumi" or inventory.project or inventory.access.project:
            os_login = f", or, with accessMode oslogin, to your account: {os_login_command(own)}"
        raise SshAuthError(
            f"cluster {inventory.cluster}: no key found, so {own} was created. Add its public half "
            f"to authorized_keys of {inventory.ssh_user} on every node: {public}{os_login} "
            "(or pass a key that they accept with --ssh-key.)"
        )
    if given is None:
        require_private(own)
    write_ssh_files(
        own.parent,
        inventory.nodes,
        user=inventory.ssh_user,
        access=inventory.access,
        key=given or own,
    )
    return given or own


def connect_to(
    inventory: ClusterInventory,
    *,
    ssh_key: Path | None,
    env: Mapping[str, str],
    news: Callable[[], str] = str,
) -> Cluster:
    """Return the cluster for an operator with this key; with None, the cluster's own key is used.

    `news` is the argument of `Cluster`. Raises SshAuthError if the key does not exist.
    """
    login = Login(user=inventory.ssh_user, key=operator_key(inventory, given=ssh_key))
    return Cluster(inventory, login=login, env=env, news=news)
