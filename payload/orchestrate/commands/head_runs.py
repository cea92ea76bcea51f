"""The runs that a cluster's head has, as far as it can be asked."""

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
from payload.stack.operator_key import operator_key_path, require_private

if TYPE_CHECKING:
    from payload.orchestrate.ssh.node_runs import NodeRun


# A machine that has no host keys yet is booting, and nobody has reached it over SSH.
_KEYS_S = 5.0
BOOT_S, _RETRY_S = 300.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head, as far as it could be asked."""

    machine: str | None = None
    """The cloud's number of it, where known."""
    is_gone: bool = False
    """True if the cloud has no such machine any more."""
    running: str | None = None
    """The run that is going on, whoever started it."""
    runs: Sequence[NodeRun] = ()
    """Its copy of every run, as far as it could be asked."""
    unasked: str | None = None
    """Why it could not be asked for one."""

    def has_lost(self, node: Node) -> bool:
        """Return whether the disk of `node`, the head of some run, went with its machine."""
        if self.machine is None or node.instance_id is None:
            return self.is_gone
        return self.machine != node.instance_id


def ask_head(
    outputs: StackOutputs,
    env: Mapping[str, str],
    *,
    folder: Path,
    more_keys: Sequence[Path],
    talk: Console,
    patience_s: float = 0.0,
) -> Head:
    """Ask it, and say so when it cannot be asked.

    The operator's key is the cluster's own in `folder`, else the first of `more_keys` that exists.
    A head that boots is asked again for `patience_s`.
    """
    inventory = outputs.inventory
    name = inventory.head.name
    talk.print(f"asking {name} whether a run is going on")
    ends = time.monotonic() + patience_s
    head = _ask(outputs, env, folder=folder, more_keys=more_keys, ends=ends, talk=talk)
    if head.is_gone:
        talk.print(f"{name}: its machine does not exist any more")
    if head.unasked:
        talk.print(f"warning: it is not known whether a run is going on: {head.unasked}")
    return head


def _ask(
    outputs: StackOutputs,
    env: Mapping[str, str],
    *,
    folder: Path,
    more_keys: Sequence[Path],
    ends: float,
    talk: Console,
) -> Head:
    # paramiko takes half a second to import.
    from payload.orchestrate.ssh.cluster import Cluster
    from payload.orchestrate.ssh.node_runs import runs_on
    from payload.orchestrate.ssh.remote_calls import Login

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
        return Head(unasked=str(error))
    keys = [operator_key_path(folder, cluster=inventory.cluster), *more_keys]
    key = next((each for each in keys if each.exists()), None)
    if key is None:
        return Head(machine=node.instance_id, unasked=f"there is no key here: {keys[0]}")
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
                return Head(machine=node.instance_id, unasked=str(error))
        time.sleep(_RETRY_S)
    return Head(machine=node.instance_id, running=found.running, runs=found.runs)
