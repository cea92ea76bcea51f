"""Pins the SSH host keys that a cluster's machines publish, in a cache on this machine."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from payload.core.errors import (
    BootstrapError,
    CloudAuthError,
    ConfigError,
    HostKeyError,
    RankLostError,
    TileforgeError,
)
from payload.core.files import write_whole
from payload.core.printable_text import shown
from payload.core.regular_files import read_bytes
from payload.core.suggested_commands import command
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import check_schema
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.clouds.gcp.client import REQUEST_S, CloudMissingError, Google, request_of
from payload.orchestrate.clouds.gcp.head_address import external_address
from payload.orchestrate.clouds.gcp.resource_kinds import ENDING, STOPPED
from payload.orchestrate.ssh.remote_calls import all_or_raise, on_every_node

DEADLINE_S = 180.0
_POLL_S = 3.0
_CACHE_VERSION, CACHE_FILE = 1, "host_keys.json"
"""File in the cluster's folder that caches the nodes with their host keys."""
_UNWRITTEN = "of type 'Guest Attribute' was not found"
_CONSTRAINT = "compute.disableGuestAttributesAccess"
_KIND = re.compile(r"(ssh-|ecdsa-)[a-z0-9@.-]{1,58}")
# An RSA key of 16,384 bits has 2,760 characters; ssh-keygen creates one key of each kind at most.
_MOST_CHARS, _MOST_KEYS = 4096, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    google: Google
    known: Mapping[str, Node]
    """Nodes by name, with the host keys that were pinned earlier."""
    ends: float
    deadline_s: float
    say: Callable[[str], None]
    sleep: Callable[[float], None]

    def pinned(self, node: Node) -> Node:
        """Return the node with instance ID, external address and host keys filled in."""
        node = self._found(node)
        before = self.known.get(node.name)
        if before is not None and before.instance_id == node.instance_id and before.host_keys:
            return replace(node, host_keys=before.host_keys)
        if before is not None and before.instance_id != node.instance_id:
            self.say(f"{node.name}: the machine was replaced; its host keys are new")
        return replace(node, host_keys=self._wait_for_keys(node))

    def _found(self, node: Node) -> Node:
        """Return the node with the instance ID and external address that Google reports."""
        request = request_of(
            "GetInstanceRequest", project=self.google.project, zone=node.zone, instance=node.name
        )
        client = self.google.compute("Instances")
        try:
            found = self.google.call(
                node.name, lambda: client.get(request=request, retry=None, timeout=REQUEST_S)
            )
        except CloudMissingError:
            raise _gone(node) from None
        if found.status in (*STOPPED, *ENDING):
            raise RankLostError(
                f"{node.name}: the machine is {found.status}, not running. Its disk is kept and "
                f"billed. Start the machine: {command('orchestrate', 'up')}; or download its "
                f"results and destroy the cluster: {command('orchestrate', 'down')}"
            )
        address = node.external_address and (external_address(found) or node.external_address)
        return replace(node, instance_id=str(found.id), external_address=address)

    def _wait_for_keys(self, node: Node) -> tuple[str, ...]:
        has_reported = False
        while True:
            keys = self._read_keys(node)
            if keys:
                if has_reported:
                    self.say(f"{node.name}: host keys published")
                return keys
            if time.monotonic() + _POLL_S > self.ends:
                raise BootstrapError(
                    f"{node.name}: no host keys published within {self.deadline_s:g} s. "
                    "Check its boot log: gcloud compute instances get-serial-port-output "
                    f"{node.name} --zone={node.zone} --project={self.google.project}"
                )
            if not has_reported:
                self.say(f"{node.name}: booting; waiting for its host keys")
                has_reported = True
            self.sleep(_POLL_S)

    def _read_keys(self, node: Node) -> tuple[str, ...]:
        """Return the published keys; an empty tuple if the machine has not published any."""
        request = request_of(
            "GetGuestAttributesInstanceRequest",
            project=self.google.project,
            zone=node.zone,
            instance=node.name,
            query_path="hostkeys/",
        )
        client = self.google.compute("Instances")
        try:
            answer = self.google.call(
                f"{node.name}: reading its guest attributes",
                lambda: client.get_guest_attributes(request=request, retry=None, timeout=REQUEST_S),
            )
        except CloudMissingError as error:
            if _UNWRITTEN in str(error):
                return ()
            raise _gone(node) from None
        except TileforgeError as error:
            if _is_disabled(str(error)):
                raise CloudAuthError(
                    f"{node.name}: cannot publish host keys, because guest attributes are "
                    f"disabled. Check the organization policy {_CONSTRAINT} and the instance's "
                    f"metadata enable-guest-attributes. Google Cloud's error: {error}"
                ) from None
            raise
        keys = sorted({_key(node, item.key, item.value) for item in _items(answer)})
        if len(keys) > _MOST_KEYS:
            raise HostKeyError(
                f"{node.name}: published {len(keys)} host keys, more than the limit of "
                f"{_MOST_KEYS}. Replace the machine."
            )
        return tuple(keys)


def pin_host_keys(
    inventory: ClusterInventory,
    google: Google,
    *,
    cache: Path,
    say: Callable[[str], None],
    deadline_s: float = DEADLINE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> ClusterInventory:
    """Return the inventory with every node's host keys and instance ID, read in parallel.

    Keys pinned earlier for the same machine are read from `cache`. Raises NodesError that names
    each failed node. Its exit code is 41 if a machine is gone, 30 if a machine has no keys after
    `deadline_s`, and 13 if a request was refused.
    """
    _check(inventory.nodes)
    google.compute("Instances")  # create the client before the threads start
    reader = _Reader(
        google=google,
        known=_read_cache(cache),
        ends=time.monotonic() + deadline_s,
        deadline_s=deadline_s,
        say=say,
        sleep=sleep,
    )
    outcomes = on_every_node(inventory.nodes, reader.pinned)
    if all(isinstance(outcome, MachineGoneError) for outcome in outcomes.values()):
        raise RankLostError(
            f"cluster {inventory.cluster}: all {len(outcomes)} machine(s) are gone (past their "
            f"lifetime, or removed). Build them again: {command('orchestrate', 'up')}; or remove "
            f"the cluster's other resources: {command('orchestrate', 'down')}"
        )
    pinned = all_or_raise(outcomes, what="reading host keys")
    nodes = tuple(pinned[node.name] for node in inventory.nodes)
    whole = replace(inventory, nodes=nodes)
    _write_cache(cache, whole)
    return whole


def pin_node(
    node: Node,
    google: Google,
    *,
    cache: Path,
    say: Callable[[str], None],
    deadline_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Node:
    """Return one node with its host keys and instance ID; `cache` is only read.

    Raises MachineGoneError if the machine is gone, and for other problems the errors of
    `pin_host_keys`.
    """
    _check([node])
    reader = _Reader(
        google=google,
        known=_read_cache(cache),
        ends=time.monotonic() + deadline_s,
        deadline_s=deadline_s,
        say=say,
        sleep=sleep,
    )
    return reader.pinned(node)


class MachineGoneError(RankLostError):
    """The instance no longer exists."""


def _gone(node: Node) -> MachineGoneError:
    return MachineGoneError(
        f"{node.name}: the machine no longer exists (preempted, past its lifetime, or removed). "
        f"Build it again: {command('orchestrate', 'up')}"
    )


def _is_disabled(message: str) -> bool:
    lower = message.lower()
    return _CONSTRAINT.lower() in lower or ("guest attributes" in lower and "disabled" in lower)


def _items(answer: Any) -> list[Any]:
    known = ("ssh-", "ecdsa-")
    return [item for item in answer.query_value.items if item.key.startswith(known)]


def _key(node: Node, kind: str, value: str) -> str:
    """Return the key as `type base64`. Raises HostKeyError if the published key is invalid."""
    text = next(iter(value.split()), "")
    try:
        blob = base64.b64decode(text, validate=True)
    except ValueError:
        blob = b""
    # RFC 4253, section 6.6: the key begins with its type, as a length-prefixed string.
    begins = len(kind).to_bytes(4, "big") + kind.encode()
    is_key = blob.startswith(begins) and len(blob) > len(begins) and len(text) <= _MOST_CHARS
    if not is_key or not _KIND.fullmatch(kind):
        raise HostKeyError(
            f"{node.name}: published an invalid host key: {shown(f'{kind} {text}')}. "
            "Replace the machine."
        )
    return f"{kind} {text}"


def _check(nodes: Sequence[Node]) -> None:
    for node in nodes:
        if node.zone is None:
            raise ConfigError(
                f"inventory: {node.name} has no zone. Update the stack: "
                f"{command('orchestrate', 'up')}"
            )


def _read_cache(path: Path) -> dict[str, Node]:
    """Return the nodes that were pinned earlier, by name; empty if the file is missing or
    damaged."""
    inventory = cached_inventory(path)
    return {} if inventory is None else {node.name: node for node in inventory.nodes}


def cached_inventory(path: Path) -> ClusterInventory | None:
    """Return the inventory with the pinned host keys; None if the file is missing or damaged."""
    where = str(path)
    try:
        raw = parse_json(read_bytes(path), where=where)
        check_schema(raw, _CACHE_VERSION, where=where)
        return ClusterInventory.from_json(json.dumps(raw.get("inventory")), where=where)
    except (OSError, TileforgeError):
        return None


def _write_cache(path: Path, inventory: ClusterInventory) -> None:
    entry = {"schema_version": _CACHE_VERSION, "inventory": json.loads(inventory.to_json())}
    write_whole(path, json.dumps(entry, indent=2))
