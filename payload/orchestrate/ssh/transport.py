"""paramiko's transport, without messages to closed channels, and why a connection ended."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any, TypeAlias

import paramiko

from payload.core.validation import printable
from payload.orchestrate.ssh.remote_calls import ProxyProcess

_NOTED_S = 1.0
SAID_CHARS = 500
# Window, data, EOF and request of RFC 4254. Not the close itself, of which paramiko sends one.
_TO_OPEN_CHANNELS = (b"\x5d", b"\x5e", b"\x5f", b"\x60", b"\x62")

# What paramiko raises when the other side does not keep to the protocol.
BROKEN = (
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


class Transport(paramiko.Transport):
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
        if isinstance(carrier, Transport) and carrier.is_gone():
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
    return printable(text).strip()[:SAID_CHARS]
