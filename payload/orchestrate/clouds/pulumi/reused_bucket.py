"""Reuses the results bucket of an earlier cluster by writing its name into the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.orchestrate.clouds.cluster_records import load_cluster_record
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
    """Replace `bucket: create` in the config with the cluster's earlier results bucket.

    Runs in that bucket can then be resumed by ID. If the configured bucket no longer exists, set
    `create` again. Raises CloudError, CloudAuthError and PulumiError.
    """
    before, setting = load_cluster_record(folder, cluster), known.get("bucket")
    if before is None or before.bucket is None or before.project != known.get("project"):
        return
    if state.bucket or setting not in ("create", before.bucket):
        return
    exists = _is_kept(google(), before.bucket, cluster, identity, region=before.region)
    if exists == (setting == before.bucket):
        return
    value, message = "create", f"gs://{before.bucket} is gone: creating a new results bucket"
    if exists:
        value = before.bucket
        message = (
            f"bucket: create: reusing gs://{value} from this cluster's earlier build; the stack's "
            "config is now set to this bucket"
        )
    talk.print(f"without --dry-run: {message}" if dry_run else message)
    if not dry_run:
        pulumi.ask("config", "set", "bucket", value)


def _is_kept(google: Google, name: str, cluster: str, identity: str, *, region: str) -> bool:
    """Return whether the bucket exists in the project and belongs to this cluster.

    After a bucket is deleted, any user can create a bucket of the same name, in any project and
    with any labels.
    """
    found = bucket_in(google, name, what=f"finding gs://{name}")
    if found is None or identity_in(found.labels) != identity:
        return False
    is_ours = found.labels.get(CLUSTER_LABEL) == cluster and KEPT_LABEL in found.labels
    return is_ours and found.location.lower() == region
