"""Orphans: what Google has of a cluster and the stack's state has not."""

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
    """Return what carries the cluster's identity and is not in the stack's state.

    A boot disk goes with its machine, so it counts only when that is gone. Raises CloudError when
    not everything could be listed.
    """
    listing = list_everything(google)
    if listing.blind:
        raise CloudError(f"what the cluster has is not all seen: {'; '.join(listing.blind)}")
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
    """List the orphans, ask, and remove them; False after a no. Raises CloudError if one stays."""
    names = ", ".join(f"{each.kind} {each.name}" for each in found)
    talk.print(f"in Google Cloud with the identity of {cluster}, but not in the stack: {names}")
    if not confirm(f"Remove these {len(found)}, to build them again?", assume_yes=assume_yes):
        return False
    failed = remove(google, found)
    if failed:
        raise CloudError(f"not everything was removed: {'; '.join(failed)}")
    return True
