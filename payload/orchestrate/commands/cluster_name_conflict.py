"""Detects another cluster of the same name in the project, and refuses it or takes it over."""

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


def own_identity(folder: Path, cluster: str, *, state_identities: Sequence[str] = ()) -> str | None:
    """Return the identity of the cluster built from `folder`, or None if the folder has no record.

    `state_identities` come from the stack's state. If only identity.json in the folder contains the
    identity, the operator must type the cluster's name to accept it. Raises ConfigError if the name
    is not typed or the file is damaged, and UsageError without a terminal.
    """
    claimed, is_proven = recorded_cluster_identity(folder, cluster)
    if is_proven or claimed is None:
        return claimed
    path = cluster_path(folder, cluster, "identity.json")
    if claimed not in state_identities and not confirm_by_name(
        f"{path} records that cluster {cluster} (identity {claimed}) was built from this folder, "
        "but the file was not written on this machine: the folder was copied or moved, or the file "
        "is from an older version. Is this cluster yours?",
        name=cluster,
        otherwise="Answer this question at a terminal; --yes does not answer it. If the cluster "
        "is not yours, remove the file.",
    ):
        raise ConfigError(f"nothing was done. If the cluster is not yours, remove {path}")
    accept_cluster_identity(folder, cluster)
    return claimed


def conflicting_resources(
    google: Google, cluster: str, own: Ownership, *, take_over: str | None, talk: Console
) -> Sequence[Resource]:
    """Return the resources that the user takes over from another cluster of this name.

    Raises ConfigError for resources with an identity other than `take_over`, which is an identity
    or NO_IDENTITY. Buckets do not conflict: their names are unique.
    """
    listing = _listed(google, cluster, own, kept="nothing was built", talk=talk)
    _, others = own.split(removable(listing))
    others = [each for each in others if is_made_by_program(each, cluster)]
    unnamed = [each for each in others if (identity_in(each.labels) or NO_IDENTITY) != take_over]
    if unnamed:
        raise ConfigError(
            f"cluster = {cluster!r}: project {google.project} has another cluster of this name, "
            f"so nothing was built: {'; and '.join(describe_others(unnamed))}. Choose another "
            "name: pulumi config set cluster NAME. Or, if that cluster is unused: "
            + command("orchestrate", "up", "--take-over", "ID")
            + f" (ID is its identity, or {NO_IDENTITY!r})"
        )
    return others


def require_own_state(
    google: Google, cluster: str, own: Ownership, *, kept: str, talk: Console
) -> None:
    """Raise ConfigError if the stack's state lists resources that now belong to another cluster.

    Pulumi identifies a resource by name. After a resource was removed without Pulumi, another user
    may have created a resource of the same name. Pulumi would then change or destroy that user's
    resource. `kept` is the part of the message that names what is kept.
    """
    _listed(google, cluster, own, kept=kept, talk=talk)


def _listed(
    google: Google, cluster: str, own: Ownership, *, kept: str, talk: Console
) -> Sequence[Resource]:
    listing = list_everything(google)
    for reason in listing.blind:
        talk.print(
            f"warning: the search for other clusters named {cluster} is incomplete: {reason}"
        )
    if belied := [each for each in listing.resources if own.belies(each)]:
        raise ConfigError(
            f"the stack's state lists resources of another cluster, so {kept}: "
            f"{'; and '.join(describe_others(belied))}. This stack's own resources were removed "
            "without Pulumi. Remove each entry from the state: `pulumi stack --show-urns`, then "
            "`pulumi state delete URN --target-dependents`"
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
    """Remove another cluster's resources if the user types its name; otherwise return False.

    Raises UsageError without a terminal, and CloudError if a resource remains.
    """
    for line in describe_others(others):
        talk.print(f"will be removed with all its data: {line}")
    talk.print("active runs on this cluster cannot be detected: only its operator has the SSH key")
    if not confirm_by_name(f"Remove these {len(others)} resource(s)?", name=cluster):
        return False
    data = [each.name for each in others if each.kind == FILESTORE]
    if not may_delete(data, kept="nothing was built"):
        return False
    if failed := remove(google, others):
        raise CloudError(f"some resources remain: {'; '.join(failed)}")
    return True
