"""Logs in to a node: checks the node's host key, authenticates, and explains failures.

Host keys come only from the inventory.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import paramiko

from payload.core.errors import (
    ConfigError,
    HostKeyError,
    SshAuthError,
    SshUnreachableError,
    TileforgeError,
)
from payload.machines.inventory import Node
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.paramiko_transport import Stream, Transport
from payload.orchestrate.ssh.remote_calls import Deadlines, Login, ProxyProcess, os_login_command

# A newly distributed key can arrive late on the node, so only a second refusal is final.
_RETRY_AFTER_REFUSAL_S = 1.0
_NO_KEY = (paramiko.SSHException, paramiko.hostkeys.InvalidHostKey, ValueError)


def dial(
    node: Node, *, login: Login, open_stream: Callable[[], Stream], deadlines: Deadlines
) -> Connection:
    """Return a connection to `node` over the stream from `open_stream`.

    Raises HostKeyError, SshAuthError (after the second refusal), SshUnreachableError and
    ConfigError.
    """
    if not node.host_keys:
        raise HostKeyError(
            f"{node.name}: no host key in the inventory, and unknown keys are not accepted",
            fix="Write the inventory again, or add the node's key: cat "
            "/etc/ssh/ssh_host_ed25519_key.pub",
        )
    # Without this setting, paramiko prints tracebacks.
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    key, known = _load_key(login.key), list(_host_keys(node))
    with contextlib.suppress(SshAuthError):
        return _dial_once(node, login, key, known, stream=open_stream(), deadlines=deadlines)
    time.sleep(_RETRY_AFTER_REFUSAL_S)
    return _dial_once(node, login, key, known, stream=open_stream(), deadlines=deadlines)


def _dial_once(
    node: Node,
    login: Login,
    key: paramiko.PKey,
    known: Sequence[tuple[str, paramiko.PKey]],
    *,
    stream: Stream,
    deadlines: Deadlines,
) -> Connection:
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    for name, host_key in known:
        client.get_host_keys().add(node.name, name, host_key)
    try:
        client.connect(
            # Because a stream is given, the name is only used to find the host key.
            node.name,
            sock=stream.socket if isinstance(stream, ProxyProcess) else stream,
            username=login.user,
            pkey=key,
            allow_agent=False,
            look_for_keys=False,
            timeout=deadlines.handshake_s,
            banner_timeout=deadlines.handshake_s,
            auth_timeout=deadlines.auth_s,
            channel_timeout=deadlines.connect_s,
            transport_factory=Transport,
        )
    except (paramiko.SSHException, EOFError, OSError) as error:
        failure = _classify(node, login, error, deadlines)
        if isinstance(failure, SshUnreachableError) and isinstance(stream, ProxyProcess):
            failure = SshUnreachableError(
                failure.cause, fix=f"{failure.fix} {stream.complaint()}".strip()
            )
        client.close()
        stream.close()
        raise failure from None
    except KeyboardInterrupt:
        client.close()
        stream.close()
        raise
    return Connection(node, client, stream)


def _classify(node: Node, login: Login, error: Exception, deadlines: Deadlines) -> TileforgeError:
    if isinstance(error, paramiko.BadHostKeyException):
        return HostKeyError(
            f"{node.name}: host key {_print(error.key)} does not match the inventory's "
            f"{_print(error.expected_key)}",
            fix="Nothing was sent. If the machine was replaced, write a new inventory. If it was "
            "not replaced, another machine may intercept the connection.",
        )
    text = str(error)
    if isinstance(error, paramiko.AuthenticationException) and not (
        # paramiko raises the same exception class for a refused key, timeouts and disconnects.
        text.startswith("Authentication timeout") or "transport shut down" in text
    ):
        return SshAuthError(
            f"{node.name}: refused the key {login.key} for user {login.user!r} twice",
            fix="Check that its public half is in that user's authorized_keys and that OS Login is "
            "off. With accessMode oslogin, add the key to your account: "
            f"{os_login_command(login.key)}",
        )
    return SshUnreachableError(
        f"{node.name}: accepts connections, but no SSH handshake within "
        f"{deadlines.handshake_s:g} s ({text or type(error).__name__})",
        fix="The machine may be booting or overloaded, or the port may belong to another program.",
    )


def _host_keys(node: Node) -> Iterator[tuple[str, paramiko.PKey]]:
    for line in node.host_keys:
        entry = None
        with contextlib.suppress(*_NO_KEY):
            entry = paramiko.hostkeys.HostKeyEntry.from_line(f"{node.name} {line}")
        if entry is None or entry.key is None:
            raise HostKeyError(
                f"{node.name}: the inventory's host key {line[:40]!r}... is not a valid key",
                fix="Write the inventory again.",
            )
        yield line.split()[0], entry.key


def _load_key(path: Path) -> paramiko.PKey:
    try:
        return paramiko.PKey.from_path(str(path))
    except FileNotFoundError:
        raise ConfigError(
            f"key {path} not found. Pass the private key that the nodes accept with --ssh-key."
        ) from None
    except (paramiko.PasswordRequiredException, TypeError):
        raise ConfigError(
            f"key {path} has a passphrase. A run cannot enter it. Pass another key with --ssh-key."
        ) from None
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, OSError, ValueError) as error:
        raise ConfigError(
            f"key {path} cannot be read ({error}). Pass another key with --ssh-key."
        ) from None


def _print(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"
