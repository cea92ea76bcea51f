"""What a cluster's head says of its runs: asked before its machine is destroyed or made anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from payload.errors import TileforgeError
from payload.inventory import ClusterInventory, Node
from payload.orchestrate.cloud.endpoints import Endpoints
from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.host_keys import MachineGoneError, pin_node
from payload.orchestrate.cloud.stack import StackOutputs, cluster_folder
from payload.orchestrate.keys import operator_key_path

if TYPE_CHECKING:
    from payload.orchestrate.code import RunsThere, RunThere

# A machine that has no host keys yet is booting, and nobody has reached it over SSH.
_KEYS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head, as far as it could be asked."""

    machine: str | None = None
    """The cloud's number of it, where known."""
    is_gone: bool = False
    """Whether the cloud has no such machine any more."""
    running: str | None = None
    """The run that is going on, whoever started it."""
    runs: Sequence[RunThere] = ()
    """What it has of every run, as far as it could be asked."""
    unasked: str | None = None
    """Why it could not be asked for one."""

    def has_lost(self, node: Node) -> bool:
        """Whether what `node`, the head of some run, had on its disk went with its machine."""
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
) -> Head:
    """Ask it, and say so when it cannot be asked.

    The operator's key is the cluster's own in `folder`, else the first of `more_keys` that exists.
    """
    inventory = outputs.inventory
    name = inventory.head.name
    talk.print(f"asking {name} whether a run is going on")
    head = _ask(outputs, env, folder=folder, more_keys=more_keys, talk=talk)
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
    talk: Console,
) -> Head:
    inventory = outputs.inventory
    own = cluster_folder(folder, inventory.cluster)
    try:
        node = pin_node(
            inventory.head,
            Google(outputs.project, endpoints=Endpoints.from_env(env)),
            cache=own / "host_keys.json",
            say=talk.print,
            deadline_s=_KEYS_S,
        )
    except MachineGoneError:
        return Head(is_gone=True)
    except TileforgeError as error:
        return Head(unasked=str(error))
    keys = [operator_key_path(folder, cluster=inventory.cluster), *more_keys]
    key = next((each for each in keys if each.exists()), None)
    if key is None:
        return Head(machine=node.instance_id, unasked=f"there is no key here: {keys[0]}")
    try:
        found = _runs(replace(inventory, nodes=(node,)), env, key=key)
    except TileforgeError as error:
        return Head(machine=node.instance_id, unasked=str(error))
    return Head(machine=node.instance_id, running=found.running, runs=found.runs)


def _runs(inventory: ClusterInventory, env: Mapping[str, str], *, key: Path) -> RunsThere:
    # paramiko takes half a second to import.
    from payload.orchestrate.cluster import Cluster
    from payload.orchestrate.code import runs_on
    from payload.orchestrate.ssh_settings import Login

    login = Login(user=inventory.ssh_user, key=key)
    with Cluster(inventory, login=login, env=env) as cluster:
        return runs_on(cluster.connect(inventory.head))
