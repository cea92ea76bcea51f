"""Destroys a stack, and looks that nothing of its cluster is left."""

from __future__ import annotations

from collections.abc import Callable

from payload.core.errors import CloudAuthError, CloudError, TeardownError, TileforgeError
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.leftovers import Sweep, conclude, look
from payload.orchestrate.clouds.gcp.ownership import Ownership
from payload.orchestrate.clouds.gcp.removal import remove
from payload.orchestrate.clouds.gcp.removal_order import Resource
from payload.orchestrate.clouds.gcp.resource_kinds import FILESTORE
from payload.orchestrate.clouds.pulumi.cli_errors import PulumiError
from payload.orchestrate.clouds.pulumi.failures import StackBusyError, explain
from payload.orchestrate.clouds.pulumi.operations import Operations
from payload.orchestrate.clouds.pulumi.stack_state import StackState, ownership_of
from payload.orchestrate.terminal.console import confirm, text_console
from payload.stack.cluster_identity import known_cluster_identity

# Buckets of older releases are protected: without the flag nothing at all would be destroyed.
_WORDS = ("destroy", "--yes", "--skip-preview", "--exclude-protected")


def destroy_and_look(
    operations: Operations,
    google: Google,
    *,
    state: StackState,
    steps: int,
    may_go: Callable[[Resource], bool],
) -> None:
    """Destroy and look, as the last two of so many steps; look also when the destroy has failed.

    `state` is the stack's before. What is left and is the cluster's own, by its identity or by that
    state, is removed after a question; a Filestore instance only where `may_go` allows it. Raises
    TeardownError when something is left, or when it cannot be shown that nothing is.
    """
    talk = operations.talk
    identity = known_cluster_identity(operations.folder, operations.cluster)
    own = ownership_of(state, identity, project=google.project)
    trouble = _destroy(operations)
    talk.print(f"{steps - 1}/{steps} destroy: " + (f"FAILED: {trouble}" if trouble else "done"))
    found = _look(operations, google, own)
    # While somebody else builds, what is not in the stack is about to be.
    if not isinstance(trouble, StackBusyError):
        removed = _remove_own(operations, google, found, may_go)
        if trouble is not None and (removed or not found.left):
            trouble = _destroy(operations)
        if removed:
            found = _look(operations, google, own)
    if found.left or found.others:
        text_console(stderr=False).print(found.table())
    try:
        conclude(found, talk=talk)
    except TeardownError as error:
        talk.print(f"{steps}/{steps} sweep: not clean")
        raise TeardownError(f"{error}{f' ({trouble})' if trouble else ''}") from None
    talk.print(f"{steps}/{steps} sweep: clean")
    if trouble is not None:
        words = "See `pulumi stack`, then: pulumi refresh && pulumi destroy"
        if isinstance(trouble, PulumiError) and trouble.trouble == "damaged state":
            words = "Or go on in another stack: pulumi stack init NAME"
        raise TeardownError(f"nothing of the cluster was found, but {trouble}. {words}")


def _destroy(operations: Operations) -> TileforgeError | None:
    update = operations.run(*_WORDS)
    return explain(update) if update.status != 0 else None


def _look(operations: Operations, google: Google, own: Ownership) -> Sweep:
    cluster, folder = operations.cluster, operations.folder
    try:
        return look(google, cluster, folder=folder, keep_buckets=True, ownership=own)
    except (CloudError, CloudAuthError) as error:
        again = f"sweep --cluster {cluster} --project {google.project}"
        raise TeardownError(
            f"it is not known what is left of {cluster}: {error} Look: {again}"
        ) from None


def _remove_own(
    operations: Operations, google: Google, found: Sweep, may_go: Callable[[Resource], bool]
) -> bool:
    """Remove what is left of the cluster's own, after a question; False for nothing."""
    going = [each for each in found.removable() if each.kind != FILESTORE or may_go(each)]
    if not going:
        return False
    operations.talk.print(
        f"left of cluster {operations.cluster}: "
        + ", ".join(f"{each.kind} {each.name}" for each in going)
    )
    if not confirm(f"Remove these {len(going)}?", assume_yes=operations.assume_yes):
        return False
    for reason in remove(google, going):
        operations.talk.print(f"warning: {reason}")
    return True
