"""A cluster from a Pulumi stack's outputs, with the host keys that its machines publish."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import payload
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
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import NODE_NAME
from payload.core.validation.records import build, check_schema
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.cloud.google import (
    REQUEST_S,
    CloudMissingError,
    Endpoints,
    Google,
    request_of,
)
from payload.orchestrate.cloud.pulumi import Pulumi, PulumiError
from payload.orchestrate.ssh.remote_calls import all_or_raise, on_every_node
from payload.stack.cloud_names import CLOUD_NAME
from payload.stack.cluster_files import cluster_path
from payload.stack.stack_settings import DEFAULTS

DEADLINE_S = 180.0
_POLL_S = 3.0
_CACHE_VERSION, CACHE_FILE = 1, "host_keys.json"
"""Name of the file in the cluster's folder that keeps the nodes and their host keys."""
STOPPED, ENDING = ("TERMINATED", "STOPPED", "SUSPENDED"), ("STOPPING", "SUSPENDING")
"""Google's words for a machine that keeps its disk and does not run, or soon will not."""
_UNWRITTEN = "of type 'Guest Attribute' was not found"
_CONSTRAINT = "compute.disableGuestAttributesAccess"
_KIND = re.compile(r"(ssh-|ecdsa-)[a-z0-9@.-]{1,58}")
# An RSA key of 16,384 bits has 2,760; ssh-keygen makes at most one key of each kind.
_MOST_CHARS, _MOST_KEYS = 4096, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    google: Google
    known: Mapping[str, Node]
    """Host keys that were pinned before, by node."""
    ends: float
    deadline_s: float
    say: Callable[[str], None]
    sleep: Callable[[float], None]

    def pinned(self, node: Node) -> Node:
        """Return the node with its machine's number, its external address and host keys."""
        node = self._found(node)
        before = self.known.get(node.name)
        if before is not None and before.instance_id == node.instance_id and before.host_keys:
            return replace(node, host_keys=before.host_keys)
        if before is not None and before.instance_id != node.instance_id:
            self.say(f"{node.name}: it is another machine than last time; its host keys are new")
        return replace(node, host_keys=self._wait_for_keys(node))

    def _found(self, node: Node) -> Node:
        """Return the node as Google has it; a stop and a start have changed its address."""
        request = request_of(
            "GetInstanceRequest", project=self.google.project, zone=node.zone, instance=node.name
        )
        client = self.google.compute("Instances")
        try:
            found = self.google.ask(
                node.name, lambda: client.get(request=request, retry=None, timeout=REQUEST_S)
            )
        except CloudMissingError:
            raise _gone(node) from None
        if found.status in (*STOPPED, *ENDING):
            raise RankLostError(
                f"{node.name}: its machine is {found.status}, not running. Its disk, with what is "
                f"on it, is kept and billed. Start it: {command('orchestrate', 'up')}; or bring "
                f"its results here and destroy it: {command('orchestrate', 'down')}"
            )
        address = node.external_address and (external_address(found) or node.external_address)
        return replace(node, instance_id=str(found.id), external_address=address)

    def _wait_for_keys(self, node: Node) -> tuple[str, ...]:
        has_told = False
        while True:
            keys = self._read_keys(node)
            if keys:
                if has_told:
                    self.say(f"{node.name}: host keys are there")
                return keys
            if time.monotonic() + _POLL_S > self.ends:
                raise BootstrapError(
                    f"{node.name}: it has not published host keys within {self.deadline_s:g} s. "
                    "See how far its boot is: gcloud compute instances get-serial-port-output "
                    f"{node.name} --zone={node.zone} --project={self.google.project}"
                )
            if not has_told:
                self.say(f"{node.name}: waiting for its host keys (it is booting)")
                has_told = True
            self.sleep(_POLL_S)

    def _read_keys(self, node: Node) -> tuple[str, ...]:
        """Return the keys, or none while the machine has written none."""
        request = request_of(
            "GetGuestAttributesInstanceRequest",
            project=self.google.project,
            zone=node.zone,
            instance=node.name,
            query_path="hostkeys/",
        )
        client = self.google.compute("Instances")
        try:
            answer = self.google.ask(
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
                    f"{node.name}: guest attributes are switched off, so it cannot publish its "
                    f"host keys. See to the organization policy {_CONSTRAINT} and to the "
                    f"instance's metadata enable-guest-attributes. Google Cloud said: {error}"
                ) from None
            raise
        keys = sorted({_key(node, item.key, item.value) for item in _items(answer)})
        if len(keys) > _MOST_KEYS:
            raise HostKeyError(
                f"{node.name}: it has published {len(keys)} host keys, at most {_MOST_KEYS} are "
                "taken. Replace the machine."
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
    """Return the inventory with every node's host keys and machine number, asked for at once.

    What was pinned for the same machine before is in `cache`. Raises NodesError that names each
    node: gone (41), without keys after `deadline_s` (30), or refused (13).
    """
    _check(inventory.nodes)
    google.compute("Instances")  # once, before the threads
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
            f"cluster {inventory.cluster}: none of its {len(outcomes)} machine(s) exists any more "
            f"(past their lifetime, or removed). Build them again: {command('orchestrate', 'up')}; "
            f"or remove the rest: {command('orchestrate', 'down')}"
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
    """Return one node with its host keys and machine number; `cache` is read and left as it is.

    Raises MachineGoneError, and for the node what `pin_host_keys` names.
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


def external_address(instance: Any) -> str | None:
    """Return the external address of one of Compute Engine's instances, or None."""
    interfaces = [each for each in instance.network_interfaces if each.access_configs]
    return str(interfaces[0].access_configs[0].nat_i_p) or None if interfaces else None


class MachineGoneError(RankLostError):
    """The instance is not there any more."""


def _gone(node: Node) -> MachineGoneError:
    return MachineGoneError(
        f"{node.name}: its machine does not exist any more (preempted, past its lifetime, or "
        f"removed). Build it again: {command('orchestrate', 'up')}"
    )


def _is_disabled(message: str) -> bool:
    lower = message.lower()
    return _CONSTRAINT.lower() in lower or ("guest attributes" in lower and "disabled" in lower)


def _items(answer: Any) -> list[Any]:
    known = ("ssh-", "ecdsa-")
    return [item for item in answer.query_value.items if item.key.startswith(known)]


def _key(node: Node, kind: str, value: str) -> str:
    """Return `type base64`.

    Raises HostKeyError: what a machine writes about itself may be anything.
    """
    text = next(iter(value.split()), "")
    try:
        blob = base64.b64decode(text, validate=True)
    except ValueError:
        blob = b""
    # RFC 4253, section 6.6: the key begins with its type, as a string with its length before it.
    begins = len(kind).to_bytes(4, "big") + kind.encode()
    is_key = blob.startswith(begins) and len(blob) > len(begins) and len(text) <= _MOST_CHARS
    if not is_key or not _KIND.fullmatch(kind):
        raise HostKeyError(
            f"{node.name}: it has published a host key that is none: {shown(f'{kind} {text}')}. "
            "Replace the machine."
        )
    return f"{kind} {text}"


def _check(nodes: Sequence[Node]) -> None:
    for node in nodes:
        if node.zone is None:
            raise ConfigError(f"inventory: {node.name} has no zone. Bring the stack up to date.")


def _read_cache(path: Path) -> dict[str, Node]:
    """Return what was pinned before; nothing when the file cannot be used."""
    inventory = _cached_inventory(path)
    return {} if inventory is None else {node.name: node for node in inventory.nodes}


def _cached_inventory(path: Path) -> ClusterInventory | None:
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


_PROJECT_FILES = tuple(
    f"Pulumi.{kind}{packed}" for kind in ("yaml", "yml", "json") for packed in ("", ".gz")
)
_MEMORY_VERSION = 1
_MOST_USD = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOutputs:
    """Outputs of the cluster program."""

    inventory: ClusterInventory
    """Without host keys; `project` is filled in."""
    project: str
    region: str
    hourly_usd: float | None
    expires: str | None
    """ISO 8601, UTC."""

    def price_and_end(self) -> str:
        """Return `$1.59/h until 2026-11-21 20:00 UTC`."""
        price = "price unknown" if self.hourly_usd is None else f"${self.hourly_usd:.2f}/h"
        if self.expires is None:
            return price
        return f"{price} until {datetime.fromisoformat(self.expires):%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """Record of a cluster for the time after `pulumi destroy`, which removes the outputs."""

    cluster: str = checked(pattern=NODE_NAME)
    project: str = checked(pattern=CLOUD_NAME)
    region: str = checked(pattern=CLOUD_NAME)
    node_usd: Mapping[str, float | None] = checked(low=0, high=_MOST_USD)
    """Dollars per hour by node; of nothing while it has only been planned."""
    bucket: str | None = checked(None, pattern=CLOUD_NAME)
    """The last results bucket that `bucket: create` made: it outlives the cluster."""

    @property
    def came_up(self) -> bool:
        """Return whether the cluster has been seen up, and not only planned."""
        return bool(self.node_usd)


def read_outputs(pulumi: Pulumi) -> StackOutputs:
    """Return the stack's outputs. Raises PulumiError and ConfigError."""
    outputs = pulumi.ask_json("stack", "output")
    name = f"stack {pulumi.stack}" if pulumi.stack else "the selected stack"
    if not isinstance(outputs, dict) or "inventory" not in outputs:
        raise PulumiError(
            f"{name} has no output `inventory`: nothing is up. Build the cluster: "
            + command("orchestrate", "up"),
            "no stack",
        )
    raw = outputs["inventory"]
    where = f"{name}: output inventory"
    known = parse_json(raw, where=where) if isinstance(raw, str) else raw
    if isinstance(known, dict):
        known = {**known, "project": outputs.get("project")}
    return StackOutputs(
        inventory=ClusterInventory.from_json(json.dumps(known), where=where),
        project=_text(outputs, "project", name),
        region=_text(outputs, "region", name),
        hourly_usd=_number(outputs.get("hourly_usd"), name),
        expires=_time(outputs.get("expires"), name),
    )


def outputs_if_any(pulumi: Pulumi) -> StackOutputs | None:
    """Return the outputs; None of a stack that never came up whole. Raises as `read_outputs`."""
    try:
        return read_outputs(pulumi)
    except PulumiError as error:
        if error.trouble != "no stack" or "has no output" not in str(error):
            raise
        return None


def default_stack(env: Mapping[str, str], *, folder: Path) -> StackOutputs | str:
    """Return the selected stack's outputs, or why there is none to be had.

    A stack whose outputs cannot be used is an error and no reason to train elsewhere. Raises
    ConfigError.
    """
    found = _project_files(folder)
    if not found:
        return "no Pulumi project here"
    if not _is_own_project(found):
        return f"{found[0]} is another project's; name its stack to use it: --inventory stack:NAME"
    try:
        return read_outputs(Pulumi(env, folder=folder))
    except PulumiError as error:
        if error.is_fault:
            raise ConfigError(f"{error} (or name the cluster: --inventory local)") from None
        if error.trouble == "no stack":
            return "no Pulumi stack is selected, or nothing is up in it"
        return "Pulumi is " + error.trouble if error.trouble != "no project" else error.trouble


def _project_files(folder: Path) -> list[Path]:
    """Return Pulumi's project files of the nearest folder that has any, from `folder` upwards."""
    for each in (folder, *folder.parents):
        if found := [each / name for name in _PROJECT_FILES if (each / name).is_file()]:
            return found
    return []


def _is_own_project(found: Sequence[Path]) -> bool:
    """Return whether this is the cluster program's project, or a copy of its file.

    A project file may name a backend: `pulumi` sends its token there. So it is not started in a
    folder that merely has one, as a cloned one may, where nobody asked for a stack.
    """
    own = Path(payload.__file__).parents[1] / _PROJECT_FILES[0]
    if len(found) > 1 or not own.is_file():
        return False
    try:
        return found[0].samefile(own) or read_bytes(found[0]) == read_bytes(own)
    except OSError:
        return False


def load_stack(
    outputs: StackOutputs, env: Mapping[str, str], *, folder: Path, say: Callable[[str], None]
) -> ClusterInventory:
    """Return the stack's cluster with host keys that its machines have published.

    Raises CloudAuthError, RankLostError, BootstrapError, CloudError.
    """
    from payload.orchestrate.cloud.google import Google

    remember(outputs, folder=folder)
    google = Google(outputs.project, endpoints=Endpoints.from_env(env))
    return pin_host_keys(
        outputs.inventory,
        google,
        cache=cluster_folder(folder, outputs.inventory.cluster) / CACHE_FILE,
        say=say,
    )


def cluster_folder(folder: Path, cluster: str) -> Path:
    """Return where this machine keeps what belongs to a cluster; made if need be, for us alone.

    Raises ConfigError for a link in its place.
    """
    own = cluster_path(folder, cluster)
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    return own


def remember(outputs: StackOutputs, *, folder: Path, made_bucket: str | None = None) -> None:
    """Keep what `sweep` needs when the outputs are gone, and the bucket that the stack has made."""
    before = recall(folder, outputs.inventory.cluster)
    kept = before.bucket if before is not None and before.project == outputs.project else None
    known = Remembered(
        cluster=outputs.inventory.cluster,
        bucket=made_bucket or kept,
        project=outputs.project,
        region=outputs.region,
        node_usd={node.name: node.hourly_usd for node in outputs.inventory.nodes},
    )
    _keep(known, folder=folder)


def remember_plan(cluster: str, known: dict[str, Any], *, folder: Path) -> None:
    """Remember a cluster by its settings before it is built: an `up` that fails has no outputs."""
    project = str(known.get("project") or "")
    before = recall(folder, cluster)
    if not project or (before is not None and before.project == project):
        return
    region = str(known.get("region") or DEFAULTS.region)
    _keep(Remembered(cluster=cluster, project=project, region=region, node_usd={}), folder=folder)


def forget_bucket(folder: Path, cluster: str, bucket: str) -> None:
    """Take a bucket that was deleted out of the record: its name is anybody's now."""
    before = recall(folder, cluster)
    if before is not None and before.bucket == bucket:
        _keep(replace(before, bucket=None), folder=folder)


def _keep(known: Remembered, *, folder: Path) -> None:
    path = cluster_folder(folder, known.cluster) / "stack.json"
    write_whole(path, json.dumps({"schema_version": _MEMORY_VERSION, **asdict(known)}, indent=2))


def recall(folder: Path, cluster: str) -> Remembered | None:
    """Return the record of a cluster, or None."""
    try:
        path = cluster_path(folder, cluster, "stack.json")
        raw = parse_json(read_bytes(path), where=str(path))
        check_schema(raw, _MEMORY_VERSION, where=str(path))
        return build(Remembered, raw, where=str(path))
    except (OSError, TileforgeError):
        return None


def recall_outputs(folder: Path, cluster: str, *, project: str) -> StackOutputs | None:
    """Return the outputs as this folder knows them from when it last reached the cluster's nodes.

    They have neither price nor end. None where it has never reached them in this project.
    """
    known = recall(folder, cluster)
    inventory = _cached_inventory(cluster_path(folder, cluster, CACHE_FILE))
    if known is None or inventory is None:
        return None
    # The record of a cluster's project is written anew before its nodes are reached there.
    if {(inventory.cluster, each) for each in (known.project, inventory.project)} != {
        (cluster, project)
    }:
        return None
    return StackOutputs(
        inventory=inventory, project=project, region=known.region, hourly_usd=None, expires=None
    )


def remembered_clusters(folder: Path) -> list[Remembered]:
    """Return every cluster that this folder has built, or begun to."""
    names = sorted(path.parent.name for path in cluster_path(folder).glob("*/stack.json"))
    return [known for name in names if (known := recall(folder, name)) is not None]


def _text(outputs: Mapping[str, Any], key: str, name: str) -> str:
    value = outputs.get(key)
    if not isinstance(value, str) or not CLOUD_NAME.fullmatch(value):
        raise ConfigError(
            f"{name}: output {key} is {shown(value)}; a name is needed. Bring the stack up to "
            "date: pulumi up"
        )
    return value


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _MOST_USD:
        return value
    raise ConfigError(f"{name}: output hourly_usd is {shown(value)}; dollars or nothing is needed.")


def _time(value: Any, name: str) -> str | None:
    if value is None:
        return None
    try:
        return datetime.fromisoformat(value).astimezone(UTC).isoformat()
    except (OverflowError, TypeError, ValueError):
        raise ConfigError(
            f"{name}: output expires is {shown(value)}; a time in ISO 8601 is needed."
        ) from None
