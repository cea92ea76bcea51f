"""`pulumi destroy`, the removal of what it does not know, and the proof that nothing is left."""

from __future__ import annotations

from payload.errors import TeardownError, TileforgeError
from payload.orchestrate.cloud.asks import confirm
from payload.orchestrate.cloud.failures import StackBusyError, explain
from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.listing import remove
from payload.orchestrate.cloud.operations import Operations
from payload.orchestrate.cloud.ownership import carrying_label
from payload.orchestrate.cloud.sweep import Sweep, conclude, look
from payload.orchestrate.console import text_console

# Buckets of older releases are protected: without the flag nothing at all would be destroyed.
_WORDS = ("destroy", "--yes", "--skip-preview", "--exclude-protected")


def destroy_and_look(operations: Operations, google: Google, *, steps: int) -> None:
    """Destroy and look, as the last two of so many steps; look also when the destroy has failed.

    What carries the cluster's label and is left is removed after a question. Raises TeardownError
    when something is left, or when it cannot be shown that nothing is.
    """
    talk = operations.talk
    trouble = _destroy(operations)
    talk.print(f"{steps - 1}/{steps} destroy: " + (f"FAILED: {trouble}" if trouble else "done"))
    found = _look(operations, google)
    # While somebody else builds, what is not in the stack is about to be.
    if not isinstance(trouble, StackBusyError) and _remove_labelled(operations, google, found):
        if trouble is not None:
            trouble = _destroy(operations)
        found = _look(operations, google)
    if found.left:
        text_console(stderr=False).print(found.table())
    try:
        conclude(found, talk=talk)
    except TeardownError as error:
        talk.print(f"{steps}/{steps} sweep: not clean")
        raise TeardownError(f"{error}{f' ({trouble})' if trouble else ''}") from None
    talk.print(f"{steps}/{steps} sweep: clean")
    if trouble is not None:
        raise TeardownError(
            f"nothing of the cluster was found, but {trouble}. See `pulumi stack`, then: pulumi "
            "refresh && pulumi destroy"
        )


def _destroy(operations: Operations) -> TileforgeError | None:
    update = operations.run(*_WORDS)
    return explain(update) if update.status != 0 else None


def _look(operations: Operations, google: Google) -> Sweep:
    return look(google, operations.cluster, folder=operations.folder, keep_buckets=True)


def _remove_labelled(operations: Operations, google: Google, found: Sweep) -> bool:
    """Remove what is left with the cluster's own label, after a question; False for nothing."""
    going = carrying_label(found.all_left(), operations.cluster)
    if not going:
        return False
    operations.talk.print(
        f"left with the label of {operations.cluster}: "
        + ", ".join(f"{each.kind} {each.name}" for each in going)
    )
    if not confirm(f"Remove these {len(going)}?", assume_yes=operations.assume_yes):
        return False
    for reason in remove(google, going):
        operations.talk.print(f"warning: {reason}")
    return True
