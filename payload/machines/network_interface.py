"""Find the network interface on the route to another machine."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

# From linux/sockios.h. Not needed on macOS, where gloo finds the interface itself.
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("256s")


def interface_towards(host: str) -> str | None:
    """Return the name of the interface on the route to `host`, or None if it is not found.

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
    # All of 127.0.0.0/8 belongs to the loopback interface, but the interface reports only one
    # address.
    return "lo" if own.startswith("127.") else None


def _address(probe: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, _IFREQ.pack(name.encode()))
    except OSError:
        return None  # no IPv4 address
    return socket.inet_ntoa(answer[20:24])
