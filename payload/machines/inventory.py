"""CONTRACT IN: the machines of a cluster. `infra` writes the inventory, `orchestrate` reads it.

The inventory contains no secret, so it can be attached to a bug report. It is untrusted: its fields
are written to ssh_config, and used in command arguments and in names of folders and hosts.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from payload.core.errors import ConfigError
from payload.core.printable_text import shown
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import NODE_NAME
from payload.core.validation.records import build, check_schema

SCHEMA_VERSION = 1

SHARED_FOLDER = "/srv/tileforge/shared"
"""Path of the folder that a cluster's nodes can share."""
RANK_PORTS = range(20_000, 32_000)
"""Ports for the ranks' rendezvous. The range is below Linux's ports for outgoing connections (from
32768), and above the ports of services."""

AccessKind = Literal["iap", "direct", "local", "slurm"]
Source = Literal["pulumi", "file", "local", "slurm"]

# No pattern matches a space, a control character, a quote, `%`, `$`, or a leading hyphen.
_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]{1,45}")
_HOST_KEY = re.compile(r"[a-z][a-z0-9@.-]{0,63} [A-Za-z0-9+/]{1,4096}={0,2}")
_NUMBER = re.compile(r"[0-9]*|0[xX][0-9A-Fa-f]*")
_USER = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?")
# Old projects are named `domain.example:name`.
_PROJECT = re.compile(r"[a-z0-9]([a-z0-9.:-]{0,61}[a-z0-9])?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{0,220}[a-z0-9]")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

CAPABILITY = re.compile(r"[0-9]{1,2}\.[0-9]")
"""Pattern of a GPU's compute capability."""

_NAME_WORDS = "a name of letters, digits, dots, hyphens and underscores"
_ADDRESS_WORDS = "an IP address or a host name"
_MOST_NODES = 4096
_MOST_CORES = 16_384
_FIX = "Correct the inventory."

# A keyword of ssh_config that disables an option (ProxyJump none).
_SSH_NOTHING = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the cluster."""

    name: str = checked(pattern=NODE_NAME, wanted=_NAME_WORDS)
    address: str = checked(pattern=_ADDRESS, wanted=_ADDRESS_WORDS)
    """Address for connections from the other nodes."""
    external_address: str | None = checked(None, pattern=_ADDRESS, wanted=_ADDRESS_WORDS)
    ssh_port: int = checked(22, low=1, high=65_535)
    """Port that accepts connections while the node is up: the port of sshd, or of slurmd under
    Slurm."""
    host_keys: tuple[str, ...] = checked(
        (), pattern=_HOST_KEY, wanted="`type base64`", max_items=16
    )
    """Host keys, each as `type base64`, as in a known_hosts file."""
    zone: str | None = checked(None, pattern=_WORD, wanted="a zone's name")
    machine_type: str | None = checked(None, pattern=_WORD, wanted="a machine type's name")
    physical_cores: int = checked(low=1, high=_MOST_CORES)
    numa_domains: int = checked(1, low=1, high=_MOST_CORES)
    memory_gib: float = checked(low=0, high=2**20)
    gpus: int = checked(0, low=0, high=64)
    """Number of NVIDIA GPUs; each GPU has one rank."""
    gpu_memory_gib: float | None = checked(None, low=0, high=2**14)
    """Memory of each GPU, or None if unknown."""
    gpu_capability: str | None = checked(None, pattern=CAPABILITY, wanted="such as 8.9")
    """Compute capability, or None if unknown."""
    hourly_usd: float | None = checked(None, low=0, high=1e6)
    """Price of this node in US dollars per hour, or None if unknown."""
    instance_id: str | None = checked(None, pattern=_WORD, wanted="the cloud's number of a machine")
    """The id that the cloud gave the machine. A new machine of the same name has a different id."""

    @property
    def outside_address(self) -> str:
        """Return the address for connections from the operator's machine."""
        return self.external_address or self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Way in which the operator connects to the head."""

    kind: AccessKind
    project: str | None = checked(None, pattern=_PROJECT, wanted="a Google Cloud project's id")
    """Google Cloud project, for access through `iap`."""

    @property
    def is_this_machine(self) -> bool:
        """Return whether the only node is the machine that the commands run on."""
        return self.kind == "local"

    @property
    def shares_folder(self) -> bool:
        """Return whether the ranks write to the local run folder itself instead of a copy."""
        return self.kind in ("local", "slurm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInventory:
    """A cluster: `nodes[0]` is the head, the other nodes are workers."""

    cluster: str = checked(pattern=NODE_NAME, wanted=_NAME_WORDS)
    source: Source
    ssh_user: str = checked(pattern=_USER, wanted="a login's name, or empty for local and slurm")
    access: Access
    nodes: tuple[Node, ...] = checked(max_items=_MOST_NODES)
    bucket: str | None = checked(None, pattern=_BUCKET, wanted="a bucket's name")
    """Name of the results bucket. None if the key is missing, because Pulumi's outputs have no
    nulls."""
    project: str | None = checked(None, pattern=_PROJECT, wanted="a Google Cloud project's id")
    """Google Cloud project of the nodes, or None if they are not in Google Cloud."""
    schema_version: int = SCHEMA_VERSION

    @property
    def head(self) -> Node:
        """Return the node on which rank 0 and mpirun run."""
        return self.nodes[0]

    def hourly_usd(self) -> float | None:
        """Return the price of all nodes, or None if a price is unknown."""
        return total_hourly_usd(self.nodes)

    def to_json(self) -> str:
        """Return the text of inventory.json."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> ClusterInventory:
        """Read inventory.json.

        `where` names the text's origin in messages. Raises ConfigError.
        """
        raw = parse_json(text, where=where, fix=_FIX)
        fix = "Write the inventory again with this release."
        check_schema(raw, SCHEMA_VERSION, where=where, fix=fix)
        inventory = build(cls, raw, where=where, fix=_FIX, refuse_unknown=True)
        for problem in _problems(inventory):
            raise ConfigError(f"{where}: {problem}")
        return inventory

    @classmethod
    def load(cls, path: Path) -> ClusterInventory:
        """Read the file at `path`. Raises ConfigError."""
        try:
            text = read_bytes(path)
        except OSError as error:
            raise ConfigError(
                f"inventory {path}: {error.strerror}. Use an existing file."
            ) from None
        return cls.from_json(text, where=str(path))


def total_hourly_usd(nodes: Sequence[Node]) -> float | None:
    """Return the price of these nodes, or None if a price is unknown."""
    prices = [node.hourly_usd for node in nodes]
    return None if None in prices else sum(price for price in prices if price is not None)


def _problems(inventory: ClusterInventory) -> Iterator[str]:
    """Yield a sentence for each conflict between fields."""
    if not inventory.nodes:
        yield "nodes is empty: at least one node is needed. Add this cluster's machines."
    if not inventory.ssh_user and not inventory.access.shares_folder:
        yield f"ssh_user = '': must be the user that logs in on every node. {_FIX}"
    # ssh finds a node by its name or its address; known_hosts uses the name in lower case.
    owners: dict[str, str] = {}
    for node in inventory.nodes:
        if node.name.lower() == _SSH_NOTHING:
            yield f"node {node.name!r}: this name disables options in ssh_config. Rename the node."
        for address in (node.address, node.external_address):
            if address is not None and _as_host(address) is None:
                yield f"node {node.name}: {shown(address)} is not {_ADDRESS_WORDS}. {_FIX}"
        for name in sorted({node.name.lower(), _as_host(node.address) or ""}):
            if name in owners:
                yield f"nodes {owners[name]} and {node.name}: both are called {name!r}. {_FIX}"
            owners[name] = node.name


def _as_host(text: str) -> str | None:
    """Return an address in canonical form, a host name in lower case, or None if it is neither.

    `1` and `0x7f.1` count as neither, because the resolver reads them as addresses and other
    programs read them as names.
    """
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        is_number = _NUMBER.fullmatch(text.rstrip(".").rpartition(".")[2])
        return None if ":" in text or is_number else text.lower()
