"""After an `up` that failed: which machines are there, and their removal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from payload.core.errors import (
    CloudAuthError,
    CloudError,
    ConfigError,
    TeardownError,
    TileforgeError,
)
from payload.core.suggested_commands import command
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.ownership import Ownership
from payload.orchestrate.clouds.pulumi.building import with_words
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import Update
from payload.orchestrate.clouds.pulumi.filestore import billed_words
from payload.orchestrate.clouds.pulumi.machine_status import (
    CLOCK_SLACK_S,
    MachinesThere,
    machines_there,
    remove_machines,
)
from payload.orchestrate.clouds.pulumi.operations import Operations
from payload.orchestrate.clouds.pulumi.stack_state import StackState, ownership_of, stack_state
from payload.orchestrate.clouds.pulumi.teardown import destroy_and_look
from payload.orchestrate.terminal.console import confirm
from payload.stack.cluster_identity import known_cluster_identity


def remaining(machines: Sequence[str], preview: Update) -> str:
    """Return in words which machines are there, and what they cost an hour as far as is known."""
    if not machines:
        return "no machine is there"
    prices = _node_prices(preview)
    usd = sum(prices.get(name, 0.0) for name in machines)
    cost = f", ${usd:.2f}/h" if usd else ""
    return f"{len(machines)} machine(s) are there{cost}: {', '.join(machines)}"


def unknown_machines(error: TileforgeError, google: Google, cluster: str, preview: Update) -> str:
    """Return the words for a failure after which the machines cannot be listed."""
    usd = sum(_node_prices(preview).values())
    cost = f"cost ${usd:.2f}/h" if usd else "cost an unknown price"
    return (
        f"it is unknown which machines exist ({str(error).rstrip('.')}); if all do, they {cost} "
        f"until their lifetime ends. Look: sweep --cluster {cluster} --project {google.project}"
    )


def _node_prices(update: Update) -> dict[str, float]:
    """Return the prices in the stack's outputs that a preview expects; what is damaged is left."""
    inventory = update.outputs.get("inventory")
    nodes = inventory.get("nodes") if isinstance(inventory, dict) else None
    return {
        each["name"]: float(each["hourly_usd"])
        for each in (nodes if isinstance(nodes, list) else [])
        if isinstance(each, dict)
        and isinstance(each.get("name"), str)
        and type(each.get("hourly_usd")) in (int, float)
    }


def what_is_there(operations: Operations, google: Google, preview: Update) -> str:
    """Return in words which machines an interrupted `up` has left."""
    cluster = operations.cluster
    try:
        state = stack_state(operations.pulumi)
        own = _own(operations, state, google)
        there = machines_there(google, own, state, since_unix=time.time())
    except TileforgeError as error:
        return unknown_machines(error, google, cluster, preview)
    return remaining(there.names, preview)


def _own(operations: Operations, state: StackState, google: Google) -> Ownership:
    identity = known_cluster_identity(operations.folder, operations.cluster)
    return ownership_of(state, identity, project=google.project)


def how_to_remove(pulumi: Pulumi) -> str:
    """Return in words what stays and is billed, and the commands that show and remove it."""
    return (
        f"{billed_words(pulumi)}What was built before stays and is billed until its lifetime ends: "
        f"look with `pulumi stack`, remove it with: {command('orchestrate', 'down')}"
    )


def refuse_if_changed(pulumi: Pulumi, before: StackState, *, kept: str) -> None:
    """Raise ConfigError when somebody else was at work while the operator was thinking."""
    if stack_state(pulumi) != before:
        raise ConfigError(
            f"the stack has changed meanwhile, so {kept}. Repeat: " + command("orchestrate", "up")
        )


def take_back(
    error: TileforgeError,
    operations: Operations,
    google: Google,
    preview: Update,
    *,
    since_unix: float,
    has_data: bool,
) -> TileforgeError:
    """Remove what an `up` without machines has built before it failed; the error to end with.

    It began at `since_unix`. What it has built is what Google has: a machine whose creation was
    accepted is not in the stack's state where the answer to a later request was a refusal. With
    `has_data` the stack had a Filestore instance before: the machines alone are removed.
    """
    pulumi, talk = operations.pulumi, operations.talk
    try:
        after = stack_state(pulumi)
        try:
            own = _own(operations, after, google)
            found = machines_there(google, own, after, since_unix=since_unix)
        except (CloudError, CloudAuthError) as blind:
            if not after.machines:
                words = unknown_machines(blind, google, operations.cluster, preview)
                remove = f"; remove them: {command('orchestrate', 'down')}"
                return TeardownError(str(with_words(error, f"And {words}{remove}")))
            found = MachinesThere(names=after.machines, older=())
        there = found.names
        if found.older:
            # Another state may know them, and results may be on them.
            words = f"Not of this `up`, and left: {', '.join(found.older)}. "
            words += how_to_remove(pulumi)
            return with_words(error, words)
        if not there:
            rest = command("orchestrate", "down")
            words = f"No machine was built. {billed_words(pulumi)}Remove the rest with: {rest}"
            return with_words(error, words)
        talk.print(f"error: {error}\nbuilt before: {', '.join(there)}")
        if not confirm("Remove what was built?", assume_yes=operations.assume_yes):
            return with_words(error, how_to_remove(pulumi))
        refuse_if_changed(pulumi, after, kept="nothing was removed")
        if has_data:
            remove_machines(google, after)
            rest = command("orchestrate", "down")
            words = "The machines that were built before are removed again"
            return with_words(error, f"{words}. {billed_words(pulumi)}Remove the rest with: {rest}")
        destroy_and_look(
            operations,
            google,
            state=after,
            steps=2,
            # There was none before: nothing is on one that this `up` has made.
            may_go=lambda each: (each.created_unix or 0.0) >= since_unix - CLOCK_SLACK_S,
        )
    except KeyboardInterrupt:
        talk.print(f"up was interrupted. {how_to_remove(pulumi)}")
        raise
    except TileforgeError as left:
        words = f"And what was built before is not all removed: {left}"
        return TeardownError(str(with_words(error, words)))
    return with_words(error, "What was built before is removed again")
