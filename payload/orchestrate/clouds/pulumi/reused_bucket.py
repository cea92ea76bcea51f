"""The results bucket of a cluster that was there before, put into the config again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.orchestrate.clouds.cluster_records import recall
from payload.orchestrate.clouds.gcp.buckets import bucket_in
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.stack_state import StackState
from payload.stack.cluster_identity import identity_in
from payload.stack.resource_labels import CLUSTER_LABEL, KEPT_LABEL


def use_kept_bucket(
    pulumi: Pulumi,
    known: Mapping[str, Any],
    cluster: str,
    state: StackState,
    google: Callable[[], Google],
    *,
    identity: str,
    folder: Path,
    dry_run: bool,
    talk: Console,
) -> None:
    """Put the bucket that this folder's cluster had before into the config, in place of `create`.

    Its runs resume by their id there. One that is gone becomes `create` again. Raises CloudError,
    CloudAuthError and PulumiError.
    """
    before, setting = recall(folder, cluster), known.get("bucket")
    if before is None or before.bucket is None or before.project != known.get("project"):
        return
    if state.bucket or setting not in ("create", before.bucket):
        return
    is_there = _is_kept(google(), before.bucket, cluster, identity, region=before.region)
    if is_there == (setting == before.bucket):
        return
    wanted, words = "create", f"gs://{before.bucket} is gone: a new results bucket is made"
    if is_there:
        wanted = before.bucket
        words = (
            f"bucket: create: gs://{wanted}, which this cluster had before, is used again; the "
            "stack's config names it now"
        )
    talk.print(f"without --dry-run: {words}" if dry_run else words)
    if not dry_run:
        pulumi.ask("config", "set", "bucket", wanted)


def _is_kept(google: Google, name: str, cluster: str, identity: str, *, region: str) -> bool:
    """Return whether the project has the bucket, and it is this cluster's.

    After its end anybody may make one of its name, in a project of theirs and with any labels.
    """
    found = bucket_in(google, name, what=f"looking for gs://{name}")
    if found is None or identity_in(found.labels) != identity:
        return False
    is_ours = found.labels.get(CLUSTER_LABEL) == cluster and KEPT_LABEL in found.labels
    return is_ours and found.location.lower() == region
