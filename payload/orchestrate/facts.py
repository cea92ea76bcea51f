"""What preflight learns from a node, typed."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from payload.inventory import Node
from payload.orchestrate.remote.mesh import BULK_BYTES

STRANGER = "operator"
"""What this machine is called where it tries what is open to others."""
_PAUSE_S = 0.1

STATE_FILE = "/var/lib/tileforge/bootstrap.json"
"""The only sign that a node's bootstrap is done, written last by it."""
LOGS = ("/var/log/tileforge-bootstrap.log", "/var/log/cloud-init-output.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The probe's answer from one node; None is what the machine did not tell."""

    time_unix: float
    """The node's clock when the probe began."""
    took_s: float
    hostname: str
    hostname_addresses: tuple[str, ...]
    architecture: str
    python: str
    bootstrap: Any
    """bootstrap.json: an object, or text when it is no JSON, or None when there is none."""
    bootstrap_log: tuple[str, ...]
    cpu_flags: tuple[str, ...] | None
    physical_cores: int | None
    numa_domains: int | None
    memory_bytes: int | None
    disk_path: str
    disk_free_bytes: int
    interface: str | None
    """On the way to the head; on the head, to the first worker."""
    source_address: str | None
    mtu: int | None
    resolver_answers: bool = True
    """Whether asking for the name of another node's address comes to an end."""
    clock_offset_s: float | None = None
    """The node's clock minus the operator's."""

    @classmethod
    def from_probe(cls, raw: Mapping[str, Any], *, clock_offset_s: float | None) -> NodeFacts:
        """The facts of a probe's JSON object."""
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in raw.items()
            if name in known
        }
        return cls(**values, clock_offset_s=clock_offset_s)


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
