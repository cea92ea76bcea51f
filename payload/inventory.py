"""CONTRACT IN: which machines there are. `infra` writes it, `orchestrate` reads it.

The inventory holds no secret: it can go into a bug report.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from payload.errors import ConfigError

SCHEMA_VERSION = 1

AccessKind = Literal["iap", "direct", "local"]
Source = Literal["pulumi", "file", "local"]

# They become words of command lines and lines of ssh_config; none may pass for an option.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9_.:-]*")
_HOST_KEY = re.compile(r"[a-z0-9@.-]+ [A-Za-z0-9+/]+={0,2}")

_T = TypeVar("_T", "Node", "Access", "ClusterInventory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the cluster."""

    name: str
    address: str
    """The address that the other nodes reach it by."""
    external_address: str | None = None
    ssh_port: int = 22
    host_keys: tuple[str, ...] = ()
    """Each as `type base64`, as in a known_hosts file."""
    zone: str | None = None
    machine_type: str | None = None
    physical_cores: int
    numa_domains: int = 1
    memory_gib: float
    hourly_usd: float | None = None
    """Price of this node, or None when it is not known."""
    instance_id: str | None = None
    """The cloud's number of the machine: another one under the same name has another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How the operator reaches the head."""

    kind: AccessKind
    project: str | None = None
    """Google Cloud project, for `iap`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInventory:
    """A cluster: `nodes[0]` is the head, the others are workers."""

    cluster: str
    source: Source
    ssh_user: str
    access: Access
    nodes: tuple[Node, ...]
    bucket: str | None = None
    """Missing means None: an output of Pulumi has no nulls."""
    project: str | None = None
    """Google Cloud project that the nodes are in, or None when they are not in one."""
    schema_version: int = SCHEMA_VERSION

    @property
    def head(self) -> Node:
        """The node that rank 0 and mpirun run on."""
        return self.nodes[0]

    def hourly_usd(self) -> float | None:
        """Price of all nodes together, or None when one node's price is not known."""
        prices = [node.hourly_usd for node in self.nodes]
        return None if None in prices else sum(price for price in prices if price is not None)

    def to_json(self) -> str:
        """The text of inventory.json."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str) -> ClusterInventory:
        """Read inventory.json.

        `where` names the text's origin in messages. Raises ConfigError.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{where}: not JSON (line {error.lineno}: {error.msg}). Write the file anew."
            ) from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: expected an object, got {type(raw).__name__}.")
        if raw.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(
                f"{where}: schema_version is {raw.get('schema_version')!r}, this release reads "
                f"{SCHEMA_VERSION}. Write the inventory anew with this release."
            )
        nodes = raw.get("nodes")
        if not isinstance(nodes, list) or not nodes:
            raise ConfigError(f"{where}: nodes is {nodes!r}; at least one node is needed.")
        parsed = dict(raw)
        parsed["nodes"] = tuple(
            _node(entry, where=f"{where}: nodes[{i}]") for i, entry in enumerate(nodes)
        )
        access = raw.get("access")
        parsed["access"] = _build(Access, access, where=f"{where}: access")
        inventory = _build(cls, parsed, where=where)
        _check_cluster(inventory, where=where)
        return inventory

    @classmethod
    def load(cls, path: Path) -> ClusterInventory:
        """Read the file at `path`. Raises ConfigError."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"inventory {path}: {error.strerror}. Name an existing file."
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"inventory {path}: byte {error.start} is not UTF-8.") from None
        return cls.from_json(text, where=str(path))


def _node(entry: Any, *, where: str) -> Node:
    if isinstance(entry, dict) and "host_keys" in entry:
        keys = entry["host_keys"]
        if not isinstance(keys, list):
            raise ConfigError(f"{where}: host_keys has {keys!r}; a list is needed.")
        entry = {**entry, "host_keys": tuple(keys)}
    node = _build(Node, entry, where=where)
    for name in ("physical_cores", "numa_domains", "ssh_port"):
        value = getattr(node, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{where}: {name} = {value!r}; a whole number of at least 1 is needed."
            )
    for name, value in (("memory_gib", node.memory_gib), ("hourly_usd", node.hourly_usd)):
        unknown = value is None and name == "hourly_usd"
        if not unknown and (not isinstance(value, (int, float)) or isinstance(value, bool)):
            raise ConfigError(f"{where}: {name} = {value!r}; a number is needed.")
    _check_words(node, where=where)
    return node


def _check_cluster(inventory: ClusterInventory, *, where: str) -> None:
    names = [node.name for node in inventory.nodes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where}: two nodes are called {twice[0]!r}. Rename one of them.")
    kinds = get_args(AccessKind)
    if inventory.access.kind not in kinds:
        raise ConfigError(
            f"{where}: access.kind is {inventory.access.kind!r}; use one of {', '.join(kinds)}."
        )
    words = [("cluster", inventory.cluster)]
    if inventory.access.kind != "local":
        words.append(("ssh_user", inventory.ssh_user))
    for name, value in words:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise ConfigError(f"{where}: {name} is {value!r}; letters, digits, dots, hyphens.")


def _check_words(node: Node, *, where: str) -> None:
    words = [("name", node.name, _NAME, "letters, digits, dots, hyphens")]
    words += [("address", node.address, _ADDRESS, "an IP address or a host name")]
    if node.external_address is not None:
        words += [("external_address", node.external_address, _ADDRESS, "an IP address or null")]
    words += [("host_keys", key, _HOST_KEY, "`type base64`") for key in node.host_keys]
    for name, value, pattern, wanted in words:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ConfigError(f"{where}: {name} has {value!r}; {wanted} is needed.")


def _build(cls: type[_T], entry: Any, *, where: str) -> _T:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object, got {entry!r}.")
    known = {field.name for field in fields(cls)}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {unknown[0]!r}. Known: {', '.join(sorted(known))}."
        )
    try:
        return cls(**entry)
    except TypeError as error:
        raise ConfigError(f"{where}: {str(error).split('() ')[-1]}.") from None
