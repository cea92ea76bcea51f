"""Identities of runs and clusters for tests."""

from __future__ import annotations

from pathlib import Path

from payload.core.files import write_whole
from payload.run_record.run_files import RunPaths
from payload.run_record.run_identity import RunIdentity
from payload.stack.cluster_identity import (
    IDENTITY_LABEL,
    accept_cluster_identity,
    resolve_cluster_identity,
)

MINE, THEIRS = RunIdentity(identity="1" * 32), RunIdentity(identity="2" * 32)
CLUSTER, ANOTHER_CLUSTER = "0123456789abcdef", "f" * 16


def cluster_labels(
    cluster: str, identity: str = CLUSTER, *, expires: int = 1_700_000_000
) -> dict[str, str]:
    """Return the labels of a cluster's resources; by default the cluster has expired."""
    return {
        "tileforge-cluster": cluster,
        IDENTITY_LABEL: identity,
        "tileforge-expires": str(expires),
    }


def write_cluster_identity(folder: Path, cluster: str, *, stack: str | None = None) -> None:
    """Make `folder` the creator of a cluster."""
    resolve_cluster_identity(folder, cluster, stack=stack, told=[CLUSTER])
    accept_cluster_identity(folder, cluster)


def write_identity(paths: RunPaths, run: RunIdentity = MINE) -> RunPaths:
    """Write an identity into a run's folder."""
    write_whole(paths.identity, run.to_json())
    return paths
