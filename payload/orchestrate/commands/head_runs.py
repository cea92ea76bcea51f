"""Queries a cluster's head for the cluster's runs, if the head can be reached."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from payload.core.errors import TileforgeError
from payload.machines.inventory import Node
from payload.orchestrate.clouds.cluster_records import cluster_folder
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.orchestrate.clouds.gcp.host_keys import CACHE_FILE, MachineGoneError, pin_node
from payload.orchestrate.clouds.pulumi.stack_outputs import StackOutputs
from payload.stack.operator_key_file import operator_key_path, require_private

if TYPE_CHECKING:
    from payload.orchestrate.ssh.remote_run_folders import NodeRun


# A machine without host keys is still booting and was never reachable over SSH.
_KEYS_S = 5.0
BOOT_S, _RETRY_S = 300.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The state of the head; if the head could not be reached, `query_error` is set."""

    machine: str | None = None
    """The instance ID, if known."""
    is_gone: bool = False
    """True if the machine no longer exists."""
    running: str | None = None
    """The id of the active run of any operator; None if no run is active."""
    runs: Sequence[NodeRun] = ()
    """The head's files of every run; empty if the head could not be reached."""
    query_error: str | None = None
    """The reason why the head could not be reached."""

    def has_lost(self, node: Node) -> bool:
        """Return True if the disk of `node` was deleted with its machine.

        `node` is the head of a run.
        """
        if self.machine is None or node.instance_id is None:
            return self.is_gone
        return self.machine != node.instance_id


def query_head(
    outputs: StackOutputs,
    env: Mapping[str, str],
    *,
    folder: Path,
    other_keys: Sequence[Path],
    talk: Console,
    retry_for_s: float = 0.0,
) -> Head:
    """Query the head for its runs, and print a warning if it cannot be reached.

    The SSH key is the cluster's key in `folder`, or the first key of `other_keys` that exists.
    If the head is booting, retry for `retry_for_s`.
    """
    inventory = outputs.inventory
    name = inventory.head.name
    talk.print(f"checking {name} for an active run")
    ends = time.monotonic() + retry_for_s
    head = _query(outputs, env, folder=folder, other_keys=other_keys, ends=ends, talk=talk)
    if head.is_gone:
        talk.print(f"{name}: the machine no longer exists")
    if head.query_error:
        talk.print(f"warning: cannot determine if a run is active: {head.query_error}")
    return head


def _query(
    outputs: StackOutputs,
    env: Mapping[str, str],
    *,
    folder: Path,
    other_keys: Sequence[Path],
    ends: float,
    talk: Console,
) -> Head:
    # paramiko takes half a second to import.
    from payload.orchestrate.ssh.cluster import Cluster
    from payload.orchestrate.ssh.remote_calls import Login
    from payload.orchestrate.ssh.remote_run_folders import runs_on

    inventory = outputs.inventory
    own = cluster_folder(folder, inventory.cluster)
    try:
        node = pin_node(
            inventory.head,
            Google(outputs.project, endpoints=Endpoints.from_env(env)),
            cache=own / CACHE_FILE,
            say=talk.print,
            deadline_s=max(_KEYS_S, ends - time.monotonic()),
        )
    except MachineGoneError:
        return Head(is_gone=True)
    except TileforgeError as error:
        return Head(query_error=str(error))
    keys = [operator_key_path(folder, cluster=inventory.cluster), *other_keys]
    key = next((each for each in keys if each.exists()), None)
    if key is None:
        return Head(machine=node.instance_id, query_error=f"SSH key not found: {keys[0]}")
    if key == keys[0]:
        require_private(key)
    pinned, login = replace(inventory, nodes=(node,)), Login(user=inventory.ssh_user, key=key)
    while True:
        try:
            with Cluster(pinned, login=login, env=env) as cluster:
                found = runs_on(cluster.connect(node))
            break
        except TileforgeError as error:
            if time.monotonic() + _RETRY_S > ends:
                return Head(machine=node.instance_id, query_error=str(error))
        time.sleep(_RETRY_S)
    return Head(machine=node.instance_id, running=found.running, runs=found.runs)
