"""`pulumi destroy`, and the look that shows whether anything is left."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from payload.errors import TeardownError
from payload.orchestrate.cloud.failures import explain
from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.pulumi_cli import Pulumi
from payload.orchestrate.cloud.sweep import conclude, look
from payload.orchestrate.console import text_console


def destroy_and_look(
    pulumi: Pulumi, google: Google, cluster: str, *, folder: Path, steps: int, talk: Console
) -> None:
    """Both, as the last two of so many steps; the look also when the destroy has failed.

    Raises TeardownError when something is left, or when it cannot be shown that nothing is.
    """
    # A results bucket is protected: without the flag nothing at all would be destroyed.
    words = ("destroy", "--yes", "--skip-preview", "--exclude-protected")
    status, output = pulumi.follow(*words, say=talk.print)
    trouble = explain(output, what="pulumi destroy") if status else None
    talk.print(f"{steps - 1}/{steps} destroy: " + (f"FAILED: {trouble}" if trouble else "done"))
    found = look(google, cluster, folder=folder, keep_buckets=True)
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
