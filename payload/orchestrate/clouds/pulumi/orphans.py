"""Finds and removes orphans: a cluster's Google Cloud resources that the stack's state lacks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from payload.core.errors import CloudError
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.listing import list_everything
from payload.orchestrate.clouds.gcp.ownership import removable
from payload.orchestrate.clouds.gcp.removal import remove
from payload.orchestrate.clouds.gcp.removal_order import Resource
from payload.orchestrate.clouds.pulumi.stack_state import StackState, ownership_of
from payload.orchestrate.terminal.console import confirm


def orphans(google: Google, state: StackState, identity: str) -> list[Resource]:
    """Return resources with the cluster's identity that are missing in the stack's state.

    A boot disk is deleted with its machine, so a boot disk is an orphan only if the machine is
    gone. Raises CloudError if some resources could not be listed.
    """
    listing = list_everything(google)
    if listing.blind:
        raise CloudError(
            f"the cluster's resources could not be listed: {'; '.join(listing.blind)}",
            fix="Check your permissions in the project, then repeat the command.",
        )
    own = ownership_of(state, identity, project=google.project)
    stack = ownership_of(state, project=google.project)
    machines = {(each.name, each.location) for each in listing.resources if each.kind == "instance"}
    return [
        each
        for each in removable(filter(own.owns, listing.resources))
        if not stack.lists(each)
        and not (each.kind == "disk" and (each.name, each.location) in machines)
    ]


def remove_orphans(
    google: Google,
    cluster: str,
    found: Sequence[Resource],
    *,
    assume_yes: bool,
    talk: Console,
) -> bool:
    """Remove the orphans after confirmation; return False if the user declines.

    Raises CloudError if a removal fails.
    """
    names = ", ".join(f"{each.kind} {each.name}" for each in found)
    talk.print(f"in Google Cloud with the identity of {cluster}, but not in the stack: {names}")
    if not confirm(f"Remove these {len(found)} and build them again?", assume_yes=assume_yes):
        return False
    failed = remove(google, found)
    if failed:
        raise CloudError(f"some were not removed: {'; '.join(failed)}")
    return True
