"""A rig's network: a bridge in a separate network namespace, and a namespace per machine.

It is separate from the host's network, so every rig has the same addresses and any number of rigs
can run side by side.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.rig.host import run

GATEWAY = "10.77.0.1"
INTERFACE = "ens4"
"""Name of the machines' interface, as on Compute Engine."""

_CLONE_NEWNET = 0x40000000


def address_of(index: int) -> str:
    """Return the address of the machine with this index."""
    return f"10.77.0.{11 + index}"


def make_operator_network(namespace: str) -> None:
    """Create the namespace of the operator, with the bridge."""
    run(["ip", "netns", "add", namespace])
    run(["ip", "-n", namespace, "link", "set", "lo", "up"])
    # By default the bridge's hardware address follows its ports'.
    bridge = ["link", "add", "br0", "address", "02:00:00:00:00:01", "type", "bridge"]
    run(["ip", "-n", namespace, *bridge])
    run(["ip", "-n", namespace, "addr", "add", f"{GATEWAY}/24", "dev", "br0"])
    run(["ip", "-n", namespace, "link", "set", "br0", "up"])


@dataclass(frozen=True, slots=True)
class Link:
    """The cable between one machine and the bridge."""

    operator: str
    """Network namespace of the bridge, where the cable's end has the machine's name."""
    machine: str
    """The machine's network namespace."""
    port: str
    address: str

    def make(self) -> None:
        """Create the cable and set the machine's address."""
        run(["ip", "netns", "add", self.machine])
        ends = [self.port, "type", "veth", "peer", "name", INTERFACE, "netns", self.machine]
        run(["ip", "-n", self.operator, "link", "add", *ends])
        run(["ip", "-n", self.operator, "link", "set", self.port, "master", "br0", "up"])
        ip = ["ip", "-n", self.machine]
        run([*ip, "link", "set", "lo", "up"])
        run([*ip, "addr", "add", f"{self.address}/24", "dev", INTERFACE])
        run([*ip, "link", "set", INTERFACE, "up"])
        run([*ip, "route", "add", "default", "via", GATEWAY])

    def plug(self) -> None:
        """Undo `unplug`: the bridge forwards again."""
        run(["bridge", "-n", self.operator, "link", "set", "dev", self.port, "state", "3"])

    def unplug(self) -> None:
        """Make the bridge drop all traffic, while the machine's interface stays up."""
        run(["bridge", "-n", self.operator, "link", "set", "dev", self.port, "state", "0"])

    def misdirect(self, address: str) -> None:
        """Send traffic for the address to a hardware address that does not exist."""
        nobody = ["lladdr", "02:00:00:00:00:ff", "nud", "permanent"]
        neighbour = ["neighbour", "replace", address, "dev", INTERFACE]
        run(["ip", "-n", self.machine, *neighbour, *nobody])

    def redirect(self, address: str) -> None:
        """Undo `misdirect`."""
        run(["ip", "-n", self.machine, "neighbour", "delete", address, "dev", INTERFACE])

    def limit(self, mbit_per_s: float) -> None:
        """Limit the rate, each way."""
        # A burst of 10 ms, and at least one unsegmented packet (TSO).
        burst_bytes = max(65536, int(mbit_per_s * 1e6 / 8 * 0.01))
        shape = ["root", "tbf", "rate", f"{int(mbit_per_s * 1000)}kbit"]
        shape += ["burst", str(burst_bytes), "latency", "200ms"]
        for namespace, device in self._ends():
            run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, *shape])

    def unlimit(self) -> None:
        """Remove the limit."""
        for namespace, device in self._ends():
            run(["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"])

    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.operator, self.port), (self.machine, INTERFACE)


@contextmanager
def joined(namespace: str) -> Iterator[None]:
    """Move this thread, and threads that it starts, into the network of `namespace`."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
        try:
            _enter(libc, there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(libc, home)
    finally:
        os.close(home)


def _enter(libc: ctypes.CDLL, descriptor: int) -> None:
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
