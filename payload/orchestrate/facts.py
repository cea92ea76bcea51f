"""What preflight learns from a node, typed."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from payload.inventory import Node
from payload.orchestrate.remote.mesh import BULK_BYTES
from payload.untrusted import checked

STRANGER = "operator"
"""What this machine is called where it tries what is open to others."""
_PAUSE_S = 0.1

STATE_FILE = "/var/lib/tileforge/bootstrap.json"
"""The only sign that a node's bootstrap is done, written last by it."""
LOGS = ("/var/log/tileforge-bootstrap.log", "/var/log/cloud-init-output.log")


# It becomes part of mpirun's and gloo's settings.
_INTERFACE = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The probe's answer from one node; None is what the machine did not tell."""

    time_unix: float = checked(low=0, high=1e11)
    """The node's clock when the probe began."""
    took_s: float = checked(low=0, high=3600)
    hostname: str = checked(max_chars=255)
    hostname_addresses: tuple[str, ...] = checked(max_items=1000, max_chars=255)
    architecture: str = checked(max_chars=64)
    python: str = checked(max_chars=64)
    bootstrap: Any
    """bootstrap.json: an object, or text when it is no JSON, or None when there is none."""
    bootstrap_log: tuple[str, ...] = checked(max_items=100)
    cpu_flags: tuple[str, ...] | None = checked(max_items=1000)
    physical_cores: int | None = checked(low=1, high=2**16)
    numa_domains: int | None = checked(low=1, high=2**16)
    memory_bytes: int | None = checked(low=0)
    disk_path: str = checked(max_chars=1024)
    disk_free_bytes: int = checked(low=0)
    interface: str | None = checked(pattern=_INTERFACE, wanted="an interface's name")
    """On the way to the head; on the head, to the first worker."""
    source_address: str | None = checked(max_chars=64)
    mtu: int | None = checked(low=1, high=2**31)
    resolver_answers: bool = True
    """Whether asking for the name of another node's address comes to an end."""
    clock_offset_s: float | None = None
    """The node's clock minus the operator's."""


def clock_offset_s(
    *, sent_unix: float, received_unix: float, node_unix: float, took_s: float
) -> float:
    """The node's clock minus ours: its answer was given between sending and receiving."""
    travel_s = max(0.0, received_unix - sent_unix - took_s)
    return node_unix - (sent_unix + travel_s / 2)


def reaches(
    node: Node, others: Collection[Node], *, port: int, trial: str, within_s: float
) -> bool:
    """Whether this machine gets through to mesh.py on that port of `node`, and is no node itself.

    The answer has to be that program's: whatever else takes a connection there does not count.
    """
    ends = time.monotonic() + within_s
    target = (node.external_address or node.address, port)
    hello = json.dumps({"trial": trial, "me": STRANGER}).encode() + b"\n"
    while (left_s := ends - time.monotonic()) > 0:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(target, timeout=left_s) as connection,
        ):
            connection.sendall(hello + bytes(BULK_BYTES))
            if connection.recv(16) == b"got it\n":
                connection.sendall(b"done\n")
                here = str(connection.getsockname()[0]).partition("%")[0]
                is_node = here in {other.address for other in others}
                return not is_node and not ipaddress.ip_address(here).is_loopback
        time.sleep(_PAUSE_S)
    return False
