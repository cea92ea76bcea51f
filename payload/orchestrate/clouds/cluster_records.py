"""Records the clusters built from a folder, in .cluster/NAME/stack.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from payload.core.errors import TileforgeError
from payload.core.files import write_whole
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import NODE_NAME
from payload.core.validation.records import build, check_schema
from payload.stack.cluster_files import cluster_path
from payload.stack.google_name_patterns import CLOUD_NAME
from payload.stack.stack_settings import DEFAULTS

_MEMORY_VERSION = 1
MOST_USD = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """Settings of a cluster, kept after `pulumi destroy` removes the stack's outputs."""

    cluster: str = checked(pattern=NODE_NAME)
    project: str = checked(pattern=CLOUD_NAME)
    region: str = checked(pattern=CLOUD_NAME)
    node_usd: Mapping[str, float | None] = checked(low=0, high=MOST_USD)
    """Dollars per hour of each node, by the node's name; empty until the cluster has been built."""
    bucket: str | None = checked(None, pattern=CLOUD_NAME)
    """The last results bucket that `bucket: create` created. The bucket outlives the cluster."""

    @property
    def came_up(self) -> bool:
        """Return whether the cluster was built, and not only planned."""
        return bool(self.node_usd)


def cluster_folder(folder: Path, cluster: str) -> Path:
    """Return the local folder for a cluster's files; create it with mode 0700 if missing.

    Raises ConfigError if the path is a symbolic link.
    """
    own = cluster_path(folder, cluster)
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    return own


def record_plan(cluster: str, known: dict[str, Any], *, folder: Path) -> None:
    """Record a cluster's settings before it is built, because a failed `up` has no outputs."""
    project = str(known.get("project") or "")
    before = load_cluster_record(folder, cluster)
    if not project or (before is not None and before.project == project):
        return
    region = str(known.get("region") or DEFAULTS.region)
    keep_record(
        ClusterRecord(cluster=cluster, project=project, region=region, node_usd={}), folder=folder
    )


def forget_bucket(folder: Path, cluster: str, bucket: str) -> None:
    """Remove a deleted bucket from the record, because another project can now use the bucket's
    name."""
    before = load_cluster_record(folder, cluster)
    if before is not None and before.bucket == bucket:
        keep_record(replace(before, bucket=None), folder=folder)


def keep_record(known: ClusterRecord, *, folder: Path) -> None:
    """Replace the record of a cluster."""
    path = cluster_folder(folder, known.cluster) / "stack.json"
    write_whole(path, json.dumps({"schema_version": _MEMORY_VERSION, **asdict(known)}, indent=2))


def load_cluster_record(folder: Path, cluster: str) -> ClusterRecord | None:
    """Return the record of a cluster, or None if it is missing or damaged."""
    try:
        path = cluster_path(folder, cluster, "stack.json")
        raw = parse_json(read_bytes(path), where=str(path))
        check_schema(raw, _MEMORY_VERSION, where=str(path))
        return build(ClusterRecord, raw, where=str(path))
    except (OSError, TileforgeError):
        return None


def recorded_clusters(folder: Path) -> list[ClusterRecord]:
    """Return the record of every cluster that `up` began to build from this folder."""
    names = sorted(path.parent.name for path in cluster_path(folder).glob("*/stack.json"))
    return [known for name in names if (known := load_cluster_record(folder, name)) is not None]
