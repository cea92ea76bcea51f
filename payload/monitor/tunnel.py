"""Forwards local ports to the loopback address of a node through an SSH connection."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from payload.core.errors import TileforgeError

_LOOPBACK = "127.0.0.1"
_OPEN_S = 10.0
_POLL_S = 0.5
_CHUNK_BYTES = 64 * 2**10


class Channel(Protocol):
    """A two-way byte stream, like a socket."""

    def fileno(self) -> int:
        """Return the file descriptor for select."""

    def recv(self, most: int, /) -> bytes:
        """Return received bytes; empty after the other side has closed."""

    def sendall(self, content: bytes, /) -> object:
        """Send all bytes of `content`."""

    def close(self) -> None:
        """Close the channel."""


class Connection(Protocol):
    """A connection to a node, such as an SSH connection."""

    def open_channel_here(self, port: int, *, timeout_s: float) -> Channel:
        """Return a channel to a port of the node's loopback address. Raises TileforgeError."""


@contextlib.contextmanager
def forwarded(connection: Connection, ports: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Listen on a local port for each port of the node; yield the local ports in the same order.

    A local port has the same number as the node's port if this number is free.
    """
    closing = threading.Event()
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(_listener(port)) for port in ports]
        for listener, port in zip(listeners, ports, strict=True):
            arguments = (connection, listener, port, closing)
            thread = threading.Thread(target=_accept, args=arguments, daemon=True)
            thread.start()
            stack.callback(thread.join)
        stack.callback(closing.set)
        yield tuple(listener.getsockname()[1] for listener in listeners)


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server((_LOOPBACK, port))
    except OSError:
        return socket.create_server((_LOOPBACK, 0))


def _accept(
    connection: Connection, listener: socket.socket, port: int, closing: threading.Event
) -> None:
    listener.settimeout(_POLL_S)
    while not closing.is_set():
        try:
            client, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        client.setblocking(True)
        arguments = (connection, client, port, closing)
        threading.Thread(target=_copy, args=arguments, daemon=True).start()


def _copy(
    connection: Connection, client: socket.socket, port: int, closing: threading.Event
) -> None:
    """Copy bytes in both directions until one side closes or `closing` is set."""
    with client, contextlib.suppress(OSError, EOFError, TileforgeError):
        channel = connection.open_channel_here(port, timeout_s=_OPEN_S)
        with contextlib.closing(channel), selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, (client, channel))
            selector.register(channel, selectors.EVENT_READ, (channel, client))
            while not closing.is_set():
                for key, _ in selector.select(_POLL_S):
                    if not _forward(*key.data):
                        return


def _forward(source: Channel, to: Channel) -> bool:
    content = source.recv(_CHUNK_BYTES)
    to.sendall(content)
    return bool(content)
