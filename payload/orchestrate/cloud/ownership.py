"""What carries a cluster's label in Google Cloud and is not in the stack: orphans.

An answer that is lost after a creation, a second Ctrl-C or a kill leaves them. Pulumi then never
gets past them ("already exists"), and never removes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from payload.errors import CloudError, ConfigError
from payload.orchestrate.cloud.asks import confirm
from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.listing import list_everything, remove
from payload.orchestrate.cloud.machines import StackState
from payload.orchestrate.cloud.resources import (
    BUCKET,
    CLUSTER_LABEL,
    KINDS,
    SERVICE_ACCOUNT,
    Resource,
    in_order,
    is_zone,
)
from payload.orchestrate.cloud.stack import recall

_COLLECTIONS = {kind.name: kind.client[0].lower() + kind.client[1:] for kind in KINDS}


def carrying_label(resources: Iterable[Resource], cluster: str) -> list[Resource]:
    """Return what carries the cluster's label and may be removed with it: no bucket."""
    own = [each for each in resources if each.labels.get(CLUSTER_LABEL) == cluster]
    return in_order(each for each in own if each.kind != BUCKET)


def orphans(google: Google, cluster: str, state: StackState) -> list[Resource]:
    """Return what carries the cluster's label and is not in the stack's state.

    A boot disk goes with its machine, so it counts only when that is gone. Raises CloudError when
    not everything could be listed.
    """
    listing = list_everything(google)
    if listing.blind:
        raise CloudError(f"what the cluster has is not all seen: {'; '.join(listing.blind)}")
    known = [found for _, found in state.parts if found]
    machines = {(each.name, each.location) for each in listing.resources if each.kind == "instance"}
    return [
        each
        for each in carrying_label(listing.resources, cluster)
        if not any(_is_same(each, found) for found in known)
        and not (each.kind == "disk" and (each.name, each.location) in machines)
    ]


def remove_orphans(
    google: Google,
    cluster: str,
    found: Sequence[Resource],
    *,
    state: StackState,
    folder: Path,
    assume_yes: bool,
    talk: Console,
) -> bool:
    """List the orphans, ask, and remove them; False after a no.

    Raises ConfigError when they may be another stack's cluster, CloudError when one stays.
    """
    names = ", ".join(f"{each.kind} {each.name}" for each in found)
    if not state.parts and recall(folder, cluster) is None:
        raise ConfigError(
            f"cluster = {cluster!r}: {names} carry this name in {google.project}, and neither this "
            "stack nor this folder has built them: they may be another stack's. Take another name: "
            f"pulumi config set cluster NAME; or, if nobody uses them: sweep --cluster {cluster} "
            "--delete"
        )
    talk.print(f"in Google Cloud with the label of {cluster}, but not in the stack: {names}")
    if not confirm(f"Remove these {len(found)}, to build them again?", assume_yes=assume_yes):
        return False
    failed = remove(google, found)
    if failed:
        raise CloudError(f"not everything was removed: {'; '.join(failed)}")
    return True


def _is_same(resource: Resource, known: str) -> bool:
    """Tell whether an id of Pulumi's state, such as projects/P/zones/Z/instances/N, is this."""
    if resource.kind == SERVICE_ACCOUNT:
        return known.endswith(f"/serviceAccounts/{resource.name}")
    collection = _COLLECTIONS.get(resource.kind, "managedZones")
    place = "global"
    if resource.location != "global":
        place = f"{'zones' if is_zone(resource.location) else 'regions'}/{resource.location}"
    if collection == "managedZones":
        return known.endswith(f"/managedZones/{resource.name}")
    return known.endswith(f"/{place}/{collection}/{resource.name}")
