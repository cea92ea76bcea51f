"""SSH to the nodes. The one module that imports paramiko, and makes text for a remote shell.

The head is reached from here, the workers through the head.

Host keys come from the inventory and nowhere else. Every wait has a deadline, every error begins
with the node's name.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shlex
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias

import paramiko

from payload.core.errors import (
    AnswerError,
    ConfigError,
    ConnectionLostError,
    HostKeyError,
    PreflightError,
    SshAuthError,
    SshUnreachableError,
    TileforgeError,
)
from payload.core.validation import MAX_FILE_BYTES, printable
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.ssh.remote_calls import (
    Completed,
    Deadlines,
    Login,
    ProxyProcess,
    open_tcp,
    os_login_command,
    route_to,
)

_KEEPALIVE_S = 15
# A key that was handed out a moment ago may need one to arrive; a second refusal is meant.
_RETRY_AFTER_REFUSAL_S = 1.0
_MARGIN_S = 5.0
_NOTED_S = 1.0
_SAID_CHARS = 500
_CHUNK_BYTES = 64 * 2**10
_TIMED_OUT = 124  # coreutils' timeout
# paramiko's words for a node that is silent; the class is that of many other errors.
_SILENT = "Timeout opening channel."
# Window, data, EOF and request of RFC 4254. Not the close itself, of which paramiko sends one.
_TO_OPEN_CHANNELS = (b"\x5d", b"\x5e", b"\x5f", b"\x60", b"\x62")
_NO_KEY = (paramiko.SSHException, paramiko.hostkeys.InvalidHostKey, ValueError)

# What paramiko raises when the other side does not keep to the protocol.
_BROKEN = (
    paramiko.SSHException,
    paramiko.SFTPError,
    EOFError,
    OSError,
    UnicodeDecodeError,
    struct.error,
)

Stream: TypeAlias = socket.socket | paramiko.Channel | ProxyProcess
"""The transport of a connection: TCP, a channel through the head, or a proxy command."""

SFTPClient: TypeAlias = paramiko.SFTPClient
Channel: TypeAlias = paramiko.Channel


def shell_text(argv: Sequence[str]) -> str:
    """Return a command as one line that every POSIX shell splits into these words again."""
    return shlex.join(argv)


def dial(
    node: Node, *, login: Login, open_stream: Callable[[], Stream], deadlines: Deadlines
) -> Connection:
    """Return a connection to `node` over what `open_stream` opens.

    Raises HostKeyError, SshAuthError (at the second refusal), SshUnreachableError and ConfigError.
    """
    if not node.host_keys:
        raise HostKeyError(
            f"{node.name}: the inventory has no host key of it, and none is accepted unseen",
            fix="Write the inventory again, or add the node's own: cat "
            "/etc/ssh/ssh_host_ed25519_key.pub",
        )
    logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else it prints tracebacks
    key, known = _load_key(login.key), list(_host_keys(node))
    with contextlib.suppress(SshAuthError):
        return _dial_once(node, login, key, known, stream=open_stream(), deadlines=deadlines)
    time.sleep(_RETRY_AFTER_REFUSAL_S)
    return _dial_once(node, login, key, known, stream=open_stream(), deadlines=deadlines)


class _Transport(paramiko.Transport):
    """Drops messages to a channel that is closed, and keeps the reason of the connection's end.

    paramiko makes a message under the channel's lock and sends it without: a command that ends at
    that moment has its channel closed in between, and OpenSSH ends the whole connection for an EOF
    or data that come later (https://github.com/paramiko/paramiko/issues/1115). Closed is a channel
    that the other side has closed, or that `close` was called for here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.node_name = ""
        """The node at the other end."""
        self.disconnect_reason = ""
        """The other side's words when it ended the connection, or our reason to."""
        # Reentrant: the garbage collector closes channels, in whatever thread it runs.
        self._send_lock = threading.RLock()

    def note_reason(self, reason: str) -> None:
        """Keep the reason of the connection's end; the first one counts."""
        self.disconnect_reason = self.disconnect_reason or reason

    def why_lost(self, error: Exception) -> str:
        """Return the reason of the connection's end, which `error` may be a consequence of."""
        if self.disconnect_reason:
            return self.disconnect_reason
        carrier = self.sock.get_transport() if isinstance(self.sock, paramiko.Channel) else None
        if isinstance(carrier, _Transport) and carrier.is_gone():
            return f"the connection to {carrier.node_name}, through which it is reached, ended"
        cause = self.saved_exception or error
        if isinstance(cause, EOFError):
            return "the other side closed it"
        said = cause.strerror if isinstance(cause, OSError) else None
        return _brief(said or str(cause)) or type(cause).__name__

    def is_gone(self) -> bool:
        """Return whether the connection has ended, also where that is just being noted."""
        # paramiko closes the channels first, and notes that the connection is lost afterwards.
        self.join(_NOTED_S)
        return not self.is_active()

    def _send_user_message(self, data: paramiko.Message) -> None:
        with self._send_lock:
            if not self._comes_after_close(data.asbytes()):
                transport: Any = super()  # its stubs lack the method
                transport._send_user_message(data)

    def _comes_after_close(self, message: bytes) -> bool:
        # This thread closes channels that the other side has closed, once they are off the list.
        if message[:1] not in _TO_OPEN_CHANNELS or threading.current_thread() is self:
            return False
        (number,) = struct.unpack_from(">I", message, 1)
        channels: Any = self
        # Dropped, too, is the EOF that `close` sends before the close itself: nobody needs it.
        open_numbers = [
            c.remote_chanid for c in channels._channels.values() if c.active and not c.closed
        ]
        return number not in open_numbers

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        code, words = message.get_int(), message.get_string()
        said = _brief(words.decode(errors="replace"))
        self.note_reason(f"the node ended it with code {code}: {said or 'no word'}")


def _brief(text: str) -> str:
    return printable(text).strip()[:_SAID_CHARS]


class Connection:
    """One node that we are logged in to."""

    def __init__(self, node: Node, client: paramiko.SSHClient, stream: Stream) -> None:
        self.node = node
        self._client = client
        self._stream = stream
        transport = client.get_transport()
        assert isinstance(transport, _Transport), "the client has just connected"
        self._transport = transport
        self._transport.node_name = node.name
        self._transport.set_keepalive(_KEEPALIVE_S)

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        sink: BinaryIO | None = None,
        most_bytes: int = MAX_FILE_BYTES,
    ) -> Completed:
        """Run a command and wait for it; on the node, too, it ends after `timeout_s`.

        With a `sink`, stdout goes there as it comes. Raises ConnectionLostError when the connection
        breaks, PreflightError at the deadline, AnswerError when it prints over `most_bytes`.
        """
        command = shell_text(["timeout", "--kill-after=5", f"{timeout_s:g}", *argv])
        with self.guard(f"running `{argv[0]}`", timeout_s=timeout_s + 2 * _MARGIN_S):
            channel = self._transport.open_session(timeout=_MARGIN_S)
            kept, complaints = io.BytesIO(), io.BytesIO()
            with ThreadPoolExecutor(2) as pool, contextlib.closing(channel):
                channel.exec_command(command)
                stdout = pool.submit(self._drain, channel, channel.recv, sink or kept, most_bytes)
                stderr = pool.submit(
                    self._drain, channel, channel.recv_stderr, complaints, MAX_FILE_BYTES
                )
                # A command need not read all of its input; its status says what matters.
                with contextlib.suppress(OSError):
                    channel.sendall(stdin)
                    channel.shutdown_write()
                status = channel.recv_exit_status()
                if status < 0 and self._transport.is_gone():
                    raise EOFError
                stdout.result()
                stderr.result()
        done = Completed(status=status, stdout=kept.getvalue(), stderr=complaints.getvalue())
        if done.status < 0:
            raise PreflightError(
                f"{self.node.name}: `{argv[0]}` was ended there by a signal",
                fix="Is the memory used up?",
            )
        if done.status == _TIMED_OUT:
            raise PreflightError(
                f"{self.node.name}: `{argv[0]}` has not ended within {timeout_s:g} s and was "
                "stopped."
            )
        return done

    def check_run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> bytes:
        """Run a command that must succeed, and return its stdout. Raises PreflightError besides."""
        done = self.run(argv, timeout_s=timeout_s, stdin=stdin)
        if done.status != 0:
            said = printable(done.stderr.decode(errors="replace")).strip().rpartition("\n")[2]
            raise PreflightError(
                f"{self.node.name}: `{argv[0]}` ended with status {done.status}: "
                f"{said[:_SAID_CHARS] or 'it gave no word'}"
            )
        return done.stdout

    @contextlib.contextmanager
    def listening(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b""
    ) -> Iterator[bytes]:
        """Start a command that stays while somebody listens, and yield its first line of JSON.

        Empty where the command has ended without one. Raises ConnectionLostError when the
        connection breaks before, and SshUnreachableError after `timeout_s`.
        """
        with self.guard(f"running `{argv[0]}`", timeout_s=timeout_s):
            channel = self._transport.open_session(timeout=_MARGIN_S)
            channel.exec_command(shell_text(argv))
            channel.sendall(stdin)
            channel.shutdown_write()
            lines = channel.makefile("rb")
            # A login shell's greeting may come before it.
            first = next((line for line in lines if line.startswith(b"{")), b"")
            if not first and self._transport.is_gone():
                raise EOFError
        with contextlib.closing(channel):
            yield first

    def _drain(
        self,
        channel: paramiko.Channel,
        receive: Callable[[int], bytes],
        sink: BinaryIO,
        most_bytes: int,
    ) -> None:
        while chunk := receive(_CHUNK_BYTES):
            most_bytes -= len(chunk)
            if most_bytes < 0:
                channel.close()
                raise AnswerError(f"{self.node.name}: it sends more than it was asked for.")
            sink.write(chunk)

    def open_sftp(self) -> SFTPClient:
        """Return a file session; call it and use it within `guard`."""
        return self._client.open_sftp()

    def open_channel_here(self, port: int, *, timeout_s: float) -> paramiko.Channel:
        """Return a stream to a port of this node's loopback address. Raises SshUnreachableError."""
        try:
            return self._transport.open_channel(
                "direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=timeout_s
            )
        except _BROKEN as error:
            raise SshUnreachableError(
                f"{self.node.name}: nothing answers at its 127.0.0.1 port {port} "
                f"({printable(str(error))})"
            ) from None

    def open_channel_to(self, node: Node, *, timeout_s: float) -> paramiko.Channel:
        """Return a stream from this node on to another one. Raises SshUnreachableError."""
        target = f"{node.name}: {node.address} port {node.ssh_port}"
        try:
            return self._transport.open_channel(
                "direct-tcpip", (node.address, node.ssh_port), ("127.0.0.1", 0), timeout=timeout_s
            )
        except paramiko.ChannelException as error:
            if error.code == 1:  # administratively prohibited
                raise SshUnreachableError(
                    f"{node.name}: {self.node.name}, through which it is reached, forbids "
                    "forwarding",
                    fix="Set AllowTcpForwarding yes in its sshd_config.",
                ) from None
            raise SshUnreachableError(
                f"{target} cannot be reached from {self.node.name} ({error.text or 'refused'})",
                fix="See whether sshd runs there and the network between the nodes is open.",
            ) from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise SshUnreachableError(
                f"{target} does not answer {self.node.name} within {timeout_s:g} s ({error})."
            ) from None

    @contextlib.contextmanager
    def guard(self, doing: str, *, timeout_s: float) -> Iterator[None]:
        """Bound what is done within by a deadline, and name the node in what goes wrong.

        paramiko has waits without a deadline; at ours the connection is closed, which ends them.
        """
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._give_up()

        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        except _BROKEN as error:
            raise self._translate(error, doing, timeout_s if expired.is_set() else None) from None
        finally:
            timer.cancel()

    def close(self) -> None:
        """Close the connection and what carries it."""
        self._client.close()
        self._stream.close()

    def _translate(
        self, error: Exception, doing: str, expired_after_s: float | None
    ) -> TileforgeError:
        if str(error) == _SILENT:
            self._give_up()  # the next one need not wait for it again
        if expired_after_s is not None or str(error) == _SILENT:
            waited = "" if expired_after_s is None else f" for {expired_after_s:g} s"
            return SshUnreachableError(
                f"{self.node.name}: no answer{waited} while {doing}",
                fix="The machine hangs, or the network to it is gone.",
            )
        from_node = isinstance(error, OSError) and error.errno is not None
        if not self._transport.is_active() or (not from_node and self._transport.is_gone()):
            fix = "Is the machine still there?"
            if isinstance(self._stream, ProxyProcess) and self._stream.ended():
                fix = f"{fix} {self._stream.complaint()}"
            return ConnectionLostError(
                f"{self.node.name}: the connection broke while {doing} "
                f"({self._transport.why_lost(error)})",
                fix=fix,
            )
        return PreflightError(f"{self.node.name}: {doing}: {error}")

    def _give_up(self) -> None:
        self._transport.note_reason("it had not answered before")
        self._transport.close()


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
            # With a stream given, the name only finds the host key.
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
            transport_factory=_Transport,
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
            f"{node.name}: it shows another host key than the inventory's: {_print(error.key)}, "
            f"not {_print(error.expected_key)}",
            fix="Nothing was sent. If the machine was replaced, write a new inventory; if not, "
            "someone may be in between.",
        )
    said = str(error)
    if isinstance(error, paramiko.AuthenticationException) and not (
        # paramiko's word for both of these is the same class as for a refusal.
        said.startswith("Authentication timeout") or "transport shut down" in said
    ):
        return SshAuthError(
            f"{node.name}: it refuses the key {login.key} for user {login.user!r}, twice",
            fix="See that its public half is in that user's authorized_keys, and that OS Login is "
            "off; where it is on by choice (accessMode oslogin), that your account has it: "
            f"{os_login_command(login.key)}",
        )
    return SshUnreachableError(
        f"{node.name}: it accepts connections, but does not speak SSH within "
        f"{deadlines.handshake_s:g} s ({said or type(error).__name__})",
        fix="It may be starting, overloaded, or not be an SSH server.",
    )


def _host_keys(node: Node) -> Iterator[tuple[str, paramiko.PKey]]:
    for line in node.host_keys:
        entry = None
        with contextlib.suppress(*_NO_KEY):
            entry = paramiko.hostkeys.HostKeyEntry.from_line(f"{node.name} {line}")
        if entry is None or entry.key is None:
            raise HostKeyError(
                f"{node.name}: the inventory's host key {line[:40]!r}... is none that can be read",
                fix="Write the inventory again.",
            )
        yield line.split()[0], entry.key


def _load_key(path: Path) -> paramiko.PKey:
    try:
        return paramiko.PKey.from_path(str(path))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no key {path}. Name the private key that the nodes know with --ssh-key."
        ) from None
    except (paramiko.PasswordRequiredException, TypeError):
        raise ConfigError(
            f"the key {path} is locked by a passphrase; a run has nobody to ask. Name another one."
        ) from None
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, OSError, ValueError) as error:
        raise ConfigError(f"the key {path} cannot be read ({error}). Name another one.") from None


def _print(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"


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
        news: Callable[[], str] = lambda: "",
    ) -> None:
        """`env` is what a proxy command runs in.

        `news` returns words where the head is reached another way than the inventory says. It is
        called when the head cannot be connected to.
        """
        self.inventory = inventory
        self._news = news
        self._login = login
        self._env = env
        self._deadlines = deadlines
        self._locks = {node.name: threading.Lock() for node in inventory.nodes}
        self._made: dict[str, Connection | TileforgeError] = {}

    def connect(self, node: Node) -> Connection:
        """Return the connection to the inventory's node of the name of `node`.

        A failure is remembered and raised again.
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
        """Close every connection, the head's last."""
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
        """Return the error; one that can be retried where the head is reached another way."""
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
                    f"{node.name}: not tried, as the way to it is through {route.jump}, which "
                    "cannot be used."
                ) from None
            return through.open_channel_to(node, timeout_s=timeout_s)
        if route.proxy:
            return ProxyProcess(route.proxy, node=node.name, env=self._env)
        return open_tcp(node, timeout_s=timeout_s)
