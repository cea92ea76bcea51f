"""Lists and removes the machines that a failed `up` created."""

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
from payload.orchestrate.clouds.pulumi.building import with_note
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import Update
from payload.orchestrate.clouds.pulumi.filestore import filestore_cost_note
from payload.orchestrate.clouds.pulumi.machine_status import (
    CLOCK_SLACK_S,
    ClusterMachines,
    cluster_machines,
    remove_machines,
)
from payload.orchestrate.clouds.pulumi.operation_runner import Operations
from payload.orchestrate.clouds.pulumi.stack_state import StackState, ownership_of, stack_state
from payload.orchestrate.clouds.pulumi.teardown import destroy_and_verify
from payload.orchestrate.terminal.console import confirm
from payload.stack.cluster_identity import known_cluster_identity


def remaining(machines: Sequence[str], preview: Update) -> str:
    """Describe which machines exist and their cost per hour, if known."""
    if not machines:
        return "no machine exists"
    prices = _node_prices(preview)
    usd = sum(prices.get(name, 0.0) for name in machines)
    cost = f", ${usd:.2f}/h" if usd else ""
    return f"{len(machines)} machine(s) exist{cost}: {', '.join(machines)}"


def unknown_machines(error: TileforgeError, google: Google, cluster: str, preview: Update) -> str:
    """Describe the possible cost if the machines cannot be listed."""
    usd = sum(_node_prices(preview).values())
    cost = f"cost ${usd:.2f}/h" if usd else "cost an unknown amount"
    sweep = command("orchestrate", "sweep", "--cluster", cluster, "--project", google.project)
    return (
        f"the machines could not be listed ({str(error).rstrip('.')}); if all exist, they {cost} "
        f"until their lifetime ends. Check: {sweep}"
    )


def _node_prices(update: Update) -> dict[str, float]:
    """Return the price of each node in the outputs of a preview; skip damaged entries."""
    inventory = update.outputs.get("inventory")
    nodes = inventory.get("nodes") if isinstance(inventory, dict) else None
    return {
        each["name"]: float(each["hourly_usd"])
        for each in (nodes if isinstance(nodes, list) else [])
        if isinstance(each, dict)
        and isinstance(each.get("name"), str)
        and type(each.get("hourly_usd")) in (int, float)
    }


def describe_machines(operations: Operations, google: Google, preview: Update) -> str:
    """Describe the machines left by an interrupted `up`."""
    cluster = operations.cluster
    try:
        state = stack_state(operations.pulumi)
        own = _own(operations, state, google)
        found = cluster_machines(google, own, state, since_unix=time.time())
    except TileforgeError as error:
        return unknown_machines(error, google, cluster, preview)
    return remaining(found.names, preview)


def _own(operations: Operations, state: StackState, google: Google) -> Ownership:
    identity = known_cluster_identity(operations.folder, operations.cluster)
    return ownership_of(state, identity, project=google.project)


def removal_note(pulumi: Pulumi) -> str:
    """Describe which resources are kept and billed, with the commands to list and remove them."""
    return (
        f"{filestore_cost_note(pulumi)}Resources built so far are kept and billed until their "
        f"lifetime ends. List them: pulumi stack; remove them: {command('orchestrate', 'down')}"
    )


def refuse_if_changed(pulumi: Pulumi, before: StackState, *, kept: str) -> None:
    """Raise ConfigError if another user changed the stack while a confirmation prompt was shown."""
    if stack_state(pulumi) != before:
        raise ConfigError(
            f"the stack was changed by another user, so {kept}. Repeat: "
            + command("orchestrate", "up")
        )


def roll_back(
    error: TileforgeError,
    operations: Operations,
    google: Google,
    preview: Update,
    *,
    since_unix: float,
    has_data: bool,
) -> TileforgeError:
    """Remove the resources built by a failed first `up`, and return the error to raise.

    `up` started at `since_unix`. The resources are read from Google, because the stack's state may
    lack a machine although Google has accepted its creation. `has_data` means that the stack had a
    Filestore instance before `up`, so only machines are removed.
    """
    pulumi, talk = operations.pulumi, operations.talk
    try:
        after = stack_state(pulumi)
        try:
            own = _own(operations, after, google)
            found = cluster_machines(google, own, after, since_unix=since_unix)
        except (CloudError, CloudAuthError) as listing_error:
            if not after.machines:
                note = unknown_machines(listing_error, google, operations.cluster, preview)
                remove = f"; remove them: {command('orchestrate', 'down')}"
                return TeardownError(str(with_note(error, f"Also, {note}{remove}")))
            found = ClusterMachines(names=after.machines, older=())
        built = found.names
        if found.older:
            # The state of another stack can list these machines, and they can hold results.
            note = (
                "These resources are kept, because they existed before this `up`: "
                f"{', '.join(found.older)}. "
            )
            note += removal_note(pulumi)
            return with_note(error, note)
        if not built:
            rest = command("orchestrate", "down")
            note = f"No machine was built. {filestore_cost_note(pulumi)}Remove the rest: {rest}"
            return with_note(error, note)
        talk.print(f"error: {error}\nbuilt so far: {', '.join(built)}")
        if not confirm("Remove these?", assume_yes=operations.assume_yes):
            return with_note(error, removal_note(pulumi))
        refuse_if_changed(pulumi, after, kept="nothing was removed")
        if has_data:
            remove_machines(google, after)
            rest = command("orchestrate", "down")
            cost = filestore_cost_note(pulumi)
            return with_note(error, f"The new machines were removed. {cost}Remove the rest: {rest}")
        destroy_and_verify(
            operations,
            google,
            state=after,
            steps=2,
            # There was no Filestore instance before `up`, so an instance that `up` created has no
            # data.
            may_go=lambda each: (each.created_unix or 0.0) >= since_unix - CLOCK_SLACK_S,
        )
    except KeyboardInterrupt:
        talk.print(f"up was interrupted. {removal_note(pulumi)}")
        raise
    except TileforgeError as left:
        note = f"Also, some of the new resources were not removed: {left}"
        return TeardownError(str(with_note(error, note)))
    return with_note(error, "The new resources were removed")
