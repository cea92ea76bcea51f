"""A paramiko transport that sends nothing to closed channels and records why it disconnected."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any, TypeAlias

import paramiko

from payload.core.printable_text import printable
from payload.orchestrate.ssh.remote_calls import (
    ProxyProcess,
)

_JOIN_S = 1.0
MESSAGE_CHARS = 500
# Window, data, EOF and request messages of RFC 4254, but not close, which paramiko sends once.
_TO_OPEN_CHANNELS = (b"\x5d", b"\x5e", b"\x5f", b"\x60", b"\x62")

# Exceptions that paramiko raises if the peer violates the protocol.
BROKEN = (
    paramiko.SSHException,
    paramiko.SFTPError,
    EOFError,
    OSError,
    UnicodeDecodeError,
    struct.error,
)

Stream: TypeAlias = socket.socket | paramiko.Channel | ProxyProcess
"""The stream that a connection uses: TCP, a channel through the head, or a proxy command."""

SFTPClient: TypeAlias = paramiko.SFTPClient
Channel: TypeAlias = paramiko.Channel


class Transport(paramiko.Transport):
    """Drops messages to closed channels and records the reason of a disconnect.

    paramiko builds a message under the channel's lock but sends it after releasing the lock. If the
    command ends in between, its channel is closed, and OpenSSH ends the whole connection when EOF
    or data arrive later (https://github.com/paramiko/paramiko/issues/1115). A channel is closed if
    the peer closed it, or if `close` was called on this side.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.node_name = ""
        """Name of the connected node."""
        self.disconnect_reason = ""
        """The peer's disconnect message, or the reason why this side disconnected."""
        # Reentrant, because the garbage collector can close channels in any thread.
        self._send_lock = threading.RLock()

    def note_reason(self, reason: str) -> None:
        """Record the reason of a disconnect; only the first reason is kept."""
        self.disconnect_reason = self.disconnect_reason or reason

    def why_lost(self, error: Exception) -> str:
        """Return why the connection was lost, which can be the cause of `error`."""
        if self.disconnect_reason:
            return self.disconnect_reason
        carrier = self.sock.get_transport() if isinstance(self.sock, paramiko.Channel) else None
        if isinstance(carrier, Transport) and carrier.is_gone():
            return (
                f"the connection to {carrier.node_name}, through which this node is reached, has "
                "ended"
            )
        cause = self.saved_exception or error
        if isinstance(cause, EOFError):
            return "the node closed the connection"
        message = cause.strerror if isinstance(cause, OSError) else None
        return _brief(message or str(cause)) or type(cause).__name__

    def is_gone(self) -> bool:
        """Return whether the connection has ended; wait briefly for a shutdown in progress."""
        # paramiko closes the channels before it marks the connection as lost.
        self.join(_JOIN_S)
        return not self.is_active()

    def _send_user_message(self, data: paramiko.Message) -> None:
        with self._send_lock:
            if not self._comes_after_close(data.asbytes()):
                transport: Any = super()  # paramiko's stubs lack the method
                transport._send_user_message(data)

    def _comes_after_close(self, message: bytes) -> bool:
        # The transport's own thread answers a close after the channel has left the list.
        if message[:1] not in _TO_OPEN_CHANNELS or threading.current_thread() is self:
            return False
        (number,) = struct.unpack_from(">I", message, 1)
        channels: Any = self
        # The EOF that `close` sends before the close message is also dropped; it is not needed.
        open_numbers = [
            c.remote_chanid for c in channels._channels.values() if c.active and not c.closed
        ]
        return number not in open_numbers

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        code, raw = message.get_int(), message.get_string()
        text = _brief(raw.decode(errors="replace"))
        self.note_reason(f"the node closed the connection with code {code}: {text or 'no message'}")


def _brief(text: str) -> str:
    return printable(text).strip()[:MESSAGE_CHARS]
