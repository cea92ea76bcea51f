"""An SSH connection to one node: commands, SFTP sessions and forwarded channels.

Every wait has a deadline, and every error starts with the node's name."""

from __future__ import annotations

import contextlib
import io
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import paramiko

from payload.core.errors import (
    AnswerError,
    ConnectionLostError,
    PreflightError,
    SshUnreachableError,
    TileforgeError,
)
from payload.core.printable_text import printable
from payload.core.regular_files import MAX_FILE_BYTES
from payload.machines.inventory import Node
from payload.orchestrate.ssh.paramiko_transport import (
    BROKEN,
    MESSAGE_CHARS,
    SFTPClient,
    Stream,
    Transport,
)
from payload.orchestrate.ssh.remote_calls import Completed, ProxyProcess

_KEEPALIVE_S = 15
_MARGIN_S = 5.0
_CHUNK_BYTES = 64 * 2**10
_TIMED_OUT = 124  # exit status of coreutils' timeout
# paramiko's message for a silent node; the exception class alone can mean other errors.
_SILENT = "Timeout opening channel."


def shell_text(argv: Sequence[str]) -> str:
    """Return one line of shell text that every POSIX shell splits into the arguments `argv`."""
    return shlex.join(argv)


class Connection:
    """An authenticated SSH connection to one node."""

    def __init__(self, node: Node, client: paramiko.SSHClient, stream: Stream) -> None:
        self.node = node
        self._client = client
        self._stream = stream
        transport = client.get_transport()
        assert isinstance(transport, Transport), "the client has just connected"
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
        """Run a command and wait for it; the node also kills it after `timeout_s`.

        If there is a `sink`, stdout is streamed to the sink. Raises ConnectionLostError if the
        connection breaks, PreflightError at the deadline, AnswerError if the output exceeds
        `most_bytes`.
        """
        command = shell_text(["timeout", "--kill-after=5", f"{timeout_s:g}", *argv])
        with self.guard(f"running `{argv[0]}`", timeout_s=timeout_s + 2 * _MARGIN_S):
            channel = self._transport.open_session(timeout=_MARGIN_S)
            kept, error_output = io.BytesIO(), io.BytesIO()
            with ThreadPoolExecutor(2) as pool, contextlib.closing(channel):
                channel.exec_command(command)
                stdout = pool.submit(self._drain, channel, channel.recv, sink or kept, most_bytes)
                stderr = pool.submit(
                    self._drain, channel, channel.recv_stderr, error_output, MAX_FILE_BYTES
                )
                # A command need not read all of its input, so its exit status decides.
                with contextlib.suppress(OSError):
                    channel.sendall(stdin)
                    channel.shutdown_write()
                status = channel.recv_exit_status()
                if status < 0 and self._transport.is_gone():
                    raise EOFError
                stdout.result()
                stderr.result()
        done = Completed(status=status, stdout=kept.getvalue(), stderr=error_output.getvalue())
        if done.status < 0:
            raise PreflightError(
                f"{self.node.name}: `{argv[0]}` was killed by a signal",
                fix="Check whether the node is out of memory.",
            )
        if done.status == _TIMED_OUT:
            raise PreflightError(
                f"{self.node.name}: `{argv[0]}` did not finish within {timeout_s:g} s and was "
                "killed."
            )
        return done

    def check_run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> bytes:
        """Run a command and return its stdout.

        Raises PreflightError if the command fails, and the errors of `run`.
        """
        done = self.run(argv, timeout_s=timeout_s, stdin=stdin)
        if done.status != 0:
            message = printable(done.stderr.decode(errors="replace")).strip().rpartition("\n")[2]
            raise PreflightError(
                f"{self.node.name}: `{argv[0]}` failed with status {done.status}: "
                f"{message[:MESSAGE_CHARS] or 'no error output'}"
            )
        return done.stdout

    @contextlib.contextmanager
    def listening(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b""
    ) -> Iterator[bytes]:
        """Start a command, yield its first line of JSON, and keep it running within the context.

        The line is empty if the command ended before it printed a line. Raises ConnectionLostError
        if the connection breaks before this line, and SshUnreachableError after `timeout_s`.
        """
        with self.guard(f"running `{argv[0]}`", timeout_s=timeout_s):
            channel = self._transport.open_session(timeout=_MARGIN_S)
            channel.exec_command(shell_text(argv))
            channel.sendall(stdin)
            channel.shutdown_write()
            lines = channel.makefile("rb")
            # A login shell's greeting can precede the line of JSON.
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
                raise AnswerError(f"{self.node.name}: sent more data than requested.")
            sink.write(chunk)

    def open_sftp(self) -> SFTPClient:
        """Return an SFTP session; open it and use it within `guard`."""
        return self._client.open_sftp()

    def open_channel_here(self, port: int, *, timeout_s: float) -> paramiko.Channel:
        """Return a channel to a loopback port of this node. Raises SshUnreachableError."""
        try:
            return self._transport.open_channel(
                "direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=timeout_s
            )
        except BROKEN as error:
            raise SshUnreachableError(
                f"{self.node.name}: no program responds at 127.0.0.1 port {port} "
                f"({printable(str(error))})"
            ) from None

    def open_channel_to(self, node: Node, *, timeout_s: float) -> paramiko.Channel:
        """Return a channel through this node to `node`. Raises SshUnreachableError."""
        target = f"{node.name}: {node.address} port {node.ssh_port}"
        try:
            return self._transport.open_channel(
                "direct-tcpip", (node.address, node.ssh_port), ("127.0.0.1", 0), timeout=timeout_s
            )
        except paramiko.ChannelException as error:
            if error.code == 1:  # code for "administratively prohibited"
                raise SshUnreachableError(
                    f"{node.name}: reached through {self.node.name}, which refuses TCP forwarding",
                    fix=f"Set AllowTcpForwarding yes in the sshd_config of {self.node.name}.",
                ) from None
            raise SshUnreachableError(
                f"{target} cannot be reached from {self.node.name} ({error.text or 'refused'})",
                fix=f"Check that sshd runs on {node.name} and that the network between the nodes "
                "is open.",
            ) from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise SshUnreachableError(
                f"{target} does not respond to {self.node.name} within {timeout_s:g} s ({error})."
            ) from None

    @contextlib.contextmanager
    def guard(self, doing: str, *, timeout_s: float) -> Iterator[None]:
        """Apply a deadline to the enclosed block, and add the node's name to errors.

        Some waits of paramiko have no deadline, and only closing the connection ends these waits.
        """
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._disconnect()

        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        except BROKEN as error:
            raise self._translate(error, doing, timeout_s if expired.is_set() else None) from None
        finally:
            timer.cancel()

    def close(self) -> None:
        """Close the connection and its underlying stream."""
        self._client.close()
        self._stream.close()

    def _translate(
        self, error: Exception, doing: str, expired_after_s: float | None
    ) -> TileforgeError:
        if str(error) == _SILENT:
            self._disconnect()  # so that the next caller does not wait again
        if expired_after_s is not None or str(error) == _SILENT:
            waited = "" if expired_after_s is None else f" for {expired_after_s:g} s"
            return SshUnreachableError(
                f"{self.node.name}: no response{waited} while {doing}",
                fix="The machine hangs, or its network is down.",
            )
        from_node = isinstance(error, OSError) and error.errno is not None
        if not self._transport.is_active() or (not from_node and self._transport.is_gone()):
            fix = "Check that the machine is running."
            if isinstance(self._stream, ProxyProcess) and self._stream.ended():
                fix = f"{fix} {self._stream.complaint()}"
            return ConnectionLostError(
                f"{self.node.name}: the connection broke while {doing} "
                f"({self._transport.why_lost(error)})",
                fix=fix,
            )
        return PreflightError(f"{self.node.name}: {doing}: {error}")

    def _disconnect(self) -> None:
        self._transport.note_reason("it did not respond before")
        self._transport.close()
