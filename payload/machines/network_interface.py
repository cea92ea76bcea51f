"""The network interface by which this machine reaches another one."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

# linux/sockios.h; macOS has another number, and one interface by which gloo finds itself.
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("256s")


def interface_towards(host: str) -> str | None:
    """Return the name of the interface on the route to `host`, or None where it is not found.

    Nothing is sent: connecting a UDP socket makes the kernel choose the route.
    """
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address(probe, name) == own:
                    return name
    except OSError:
        return None
    # All of 127.0.0.0/8 is the loopback interface's, which shows one address.
    return "lo" if own.startswith("127.") else None


def _address(probe: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, _IFREQ.pack(name.encode()))
    except OSError:
        return None  # it has no IPv4 address
    return socket.inet_ntoa(answer[20:24])
