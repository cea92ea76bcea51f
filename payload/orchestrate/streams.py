"""What carries a connection to a node: TCP, or a program, which ssh calls a ProxyCommand."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from payload.errors import ConfigError, SshUnreachableError
from payload.inventory import Access, Node

_KILL_AFTER_S = 5.0
_TAIL_LINES = 3


def open_tcp(node: Node, *, timeout_s: float) -> socket.socket:
    """A connection to the node's SSH port. Raises SshUnreachableError."""
    address = (node.external_address or node.address, node.ssh_port)
    where = f"{node.name}: {address[0]} port {address[1]}"
    try:
        return socket.create_connection(address, timeout=timeout_s)
    except socket.gaierror as error:
        raise SshUnreachableError(
            f"{node.name}: the name {address[0]!r} does not resolve ({error.strerror}). Correct "
            "the inventory, or see to the name service."
        ) from None
    except ConnectionRefusedError:
        raise SshUnreachableError(
            f"{where} refuses connections: the machine is up, sshd is not running there. Start it, "
            "or wait if the machine is booting."
        ) from None
    except TimeoutError:
        raise SshUnreachableError(
            f"{where} does not answer within {timeout_s:g} s. The machine is off, the address is "
            "wrong, or a firewall drops the packets."
        ) from None
    except OSError as error:
        raise SshUnreachableError(
            f"{where} cannot be reached ({error.strerror}). See to the route and the address."
        ) from None


def iap_argv(node: Node, access: Access) -> list[str]:
    """The command that carries SSH to `node` through Google's Identity-Aware Proxy.

    Raises ConfigError when the inventory does not say where the node is.
    """
    if not access.project or not node.zone:
        missing = "access.project" if not access.project else f"the zone of {node.name}"
        raise ConfigError(
            f"inventory: access kind 'iap' needs {missing}. Write the inventory anew."
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
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._said,
                env=dict(env),
                # A terminal's Ctrl-C goes to its whole group, and what it asks goes through here.
                start_new_session=True,
            )
        except OSError as error:
            self.socket.close()
            self._said.close()
            raise SshUnreachableError(
                f"{node}: cannot start `{argv[0]}`, which carries the connection "
                f"({error.strerror}). Install it, and see that it is on PATH."
            ) from None
        finally:
            theirs.close()

    def complaint(self) -> str:
        """The end of what the program printed on stderr, on one line."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        said = " / ".join([line.strip() for line in lines if line.strip()][-_TAIL_LINES:])
        return f"`{self._argv0}` said: {said}" if said else f"`{self._argv0}` said nothing"

    def ended(self) -> bool:
        """Whether the program has ended."""
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
