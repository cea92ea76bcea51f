"""Destroys a stack, and verifies that no resource of its cluster remains."""

from __future__ import annotations

from collections.abc import Callable

from payload.core.errors import CloudAuthError, CloudError, TeardownError, TileforgeError
from payload.core.suggested_commands import command
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.leftovers import (
    Sweep,
    find_leftovers,
    print_leftovers,
    report_leftovers,
)
from payload.orchestrate.clouds.gcp.ownership import Ownership
from payload.orchestrate.clouds.gcp.removal import remove
from payload.orchestrate.clouds.gcp.removal_order import Resource
from payload.orchestrate.clouds.gcp.resource_kinds import FILESTORE
from payload.orchestrate.clouds.pulumi.cli_errors import PulumiError
from payload.orchestrate.clouds.pulumi.failures import StackBusyError, explain
from payload.orchestrate.clouds.pulumi.operation_runner import Operations
from payload.orchestrate.clouds.pulumi.stack_state import StackState, ownership_of
from payload.orchestrate.terminal.console import confirm
from payload.stack.cluster_identity import known_cluster_identity

# Older releases protected buckets; without the option, nothing would be destroyed.
_DESTROY = ("destroy", "--yes", "--skip-preview", "--exclude-protected")


def destroy_and_verify(
    operations: Operations,
    google: Google,
    *,
    state: StackState,
    steps: int,
    may_go: Callable[[Resource], bool],
) -> None:
    """Destroy the stack and verify that nothing is left.

    The destroy and the verification are reported as the last two of `steps` steps. The verification
    also runs after a failed destroy. Leftovers that belong to the cluster, according to its
    identity or to `state` (read before the destroy), are removed after confirmation. A Filestore
    instance is removed only if `may_go` allows it. Raises TeardownError if resources are left or
    cannot be listed.
    """
    talk = operations.talk
    identity = known_cluster_identity(operations.folder, operations.cluster)
    own = ownership_of(state, identity, project=google.project)
    trouble = _destroy(operations)
    talk.print(f"{steps - 1}/{steps} destroy: " + (f"FAILED: {trouble}" if trouble else "done"))
    found = _look(operations, google, own)
    # While another user's `up` runs, resources outside the stack can belong to that `up`.
    if not isinstance(trouble, StackBusyError):
        removed = _remove_own(operations, google, found, may_go)
        if trouble is not None and (removed or not found.left):
            trouble = _destroy(operations)
        if removed:
            found = _look(operations, google, own)
    if found.left or found.others:
        print_leftovers(found)
    try:
        report_leftovers(found, talk=talk)
    except TeardownError as error:
        talk.print(f"{steps}/{steps} sweep: not clean")
        raise TeardownError(f"{error}{f' ({trouble})' if trouble else ''}") from None
    talk.print(f"{steps}/{steps} sweep: clean")
    if trouble is not None:
        fix = "Check `pulumi stack`, then: pulumi refresh && pulumi destroy"
        if isinstance(trouble, PulumiError) and trouble.trouble == "damaged state":
            fix = "Or continue with another stack: pulumi stack init NAME"
        raise TeardownError(f"no resource of the cluster was found, but {trouble}. {fix}")


def _destroy(operations: Operations) -> TileforgeError | None:
    update = operations.run(*_DESTROY)
    return explain(update) if update.status != 0 else None


def _look(operations: Operations, google: Google, own: Ownership) -> Sweep:
    cluster, folder = operations.cluster, operations.folder
    try:
        return find_leftovers(google, cluster, folder=folder, keep_buckets=True, ownership=own)
    except (CloudError, CloudAuthError) as error:
        again = command("orchestrate", "sweep", "--cluster", cluster, "--project", google.project)
        raise TeardownError(
            f"leftovers of {cluster} could not be listed: {error} Check: {again}"
        ) from None


def _remove_own(
    operations: Operations, google: Google, found: Sweep, may_go: Callable[[Resource], bool]
) -> bool:
    """Remove the cluster's own leftovers after confirmation; return False if none is removed."""
    going = [each for each in found.removable() if each.kind != FILESTORE or may_go(each)]
    if not going:
        return False
    operations.talk.print(
        f"leftovers of cluster {operations.cluster}: "
        + ", ".join(f"{each.kind} {each.name}" for each in going)
    )
    if not confirm(f"Remove these {len(going)} resource(s)?", assume_yes=operations.assume_yes):
        return False
    for reason in remove(google, going):
        operations.talk.print(f"warning: {reason}")
    return True
