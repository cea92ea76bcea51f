"""Another cluster of the same name in the project: refused, or taken over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from payload.core.errors import CloudError, ConfigError
from payload.core.suggested_commands import command
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.cluster_of_resource import is_made_by_program
from payload.orchestrate.clouds.gcp.filestore_confirmation import MayDelete
from payload.orchestrate.clouds.gcp.listing import list_everything
from payload.orchestrate.clouds.gcp.ownership import (
    NO_IDENTITY,
    Ownership,
    describe_others,
    removable,
)
from payload.orchestrate.clouds.gcp.removal import remove
from payload.orchestrate.clouds.gcp.removal_order import Resource
from payload.orchestrate.clouds.gcp.resource_kinds import FILESTORE
from payload.orchestrate.terminal.console import confirm_by_name
from payload.stack.cluster_files import cluster_path
from payload.stack.cluster_identity import (
    accept_cluster_identity,
    identity_in,
    recorded_cluster_identity,
)


def own_identity(folder: Path, cluster: str, *, told: Sequence[str] = ()) -> str | None:
    """Return the identity of the cluster that is built from `folder`; None where none is known.

    `told` are those in the stack's state. What the folder's file alone says counts once the
    operator has typed the cluster's name. Raises ConfigError where it was not typed, or the file is
    damaged, and UsageError where nobody can be asked.
    """
    claimed, is_proven = recorded_cluster_identity(folder, cluster)
    if is_proven or claimed is None:
        return claimed
    path = cluster_path(folder, cluster, "identity.json")
    if claimed not in told and not confirm_by_name(
        f"{path} says that the cluster {cluster} of identity {claimed} was built from this folder, "
        "and nothing shows that you have written that. It may have come with the folder, or be of "
        "an older version, or the folder was moved. Is it your cluster?",
        name=cluster,
        otherwise="Answer it once at a terminal; --yes does not. Or, if it is not yours, remove "
        "the file.",
    ):
        raise ConfigError(f"nothing was done. If the cluster is not yours, remove {path}")
    accept_cluster_identity(folder, cluster)
    return claimed


def of_this_name(
    google: Google, cluster: str, own: Ownership, *, take_over: str | None, talk: Console
) -> Sequence[Resource]:
    """Return what another cluster of the name has, and is to be taken over.

    Raises ConfigError where there is any that `take_over`, an identity or NO_IDENTITY, does not
    name. A bucket is in nobody's way: each has a name of its own.
    """
    listing = _listed(google, cluster, own, kept="nothing was built", talk=talk)
    _, others = own.split(removable(listing))
    others = [each for each in others if is_made_by_program(each, cluster)]
    unnamed = [each for each in others if (identity_in(each.labels) or NO_IDENTITY) != take_over]
    if unnamed:
        raise ConfigError(
            f"cluster = {cluster!r}: project {google.project} has another cluster of this name, "
            f"so nothing was built. It is {'; and '.join(describe_others(unnamed))}. Take another "
            "name: pulumi config set cluster NAME. Or, if nobody uses that one: "
            + command("orchestrate", "up", "--take-over", "ID")
            + f" (ID is its identity, or {NO_IDENTITY!r})"
        )
    return others


def require_own_state(
    google: Google, cluster: str, own: Ownership, *, kept: str, talk: Console
) -> None:
    """Raise ConfigError where the stack's state lists what is another cluster's by now.

    Pulumi knows a resource by its name: what was removed without Pulumi and built again by somebody
    else would be changed or destroyed as if it were ours. `kept` says what is not done then.
    """
    _listed(google, cluster, own, kept=kept, talk=talk)


def _listed(
    google: Google, cluster: str, own: Ownership, *, kept: str, talk: Console
) -> Sequence[Resource]:
    listing = list_everything(google)
    for reason in listing.blind:
        talk.print(f"warning: another cluster of the name {cluster} may not be seen: {reason}")
    if belied := [each for each in listing.resources if own.belies(each)]:
        raise ConfigError(
            f"the stack lists what is another cluster's by now, so {kept}: "
            f"{'; and '.join(describe_others(belied))}. What this stack had was removed without "
            "Pulumi. Take it out of the stack: `pulumi stack --show-urns`, then `pulumi state "
            "delete URN --target-dependents` for each"
        )
    return listing.resources


def take_over(
    google: Google,
    others: Sequence[Resource],
    *,
    cluster: str,
    may_delete: MayDelete,
    talk: Console,
) -> bool:
    """Remove another cluster's resources after its name was typed; False where it was not.

    Raises UsageError where nobody can be asked, and CloudError when something stays.
    """
    for line in describe_others(others):
        talk.print(f"to be removed with all that is on it, {line}")
    talk.print(
        "whether a run is going on there cannot be asked from here: its own operator has the key"
    )
    if not confirm_by_name(f"Remove these {len(others)} resource(s)?", name=cluster):
        return False
    data = [each.name for each in others if each.kind == FILESTORE]
    if not may_delete(data, kept="nothing was built"):
        return False
    if failed := remove(google, others):
        raise CloudError(f"not everything was removed: {'; '.join(failed)}")
    return True
