"""Labels that identify billed resources and their expiry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pulumi

from payload.core.errors import ConfigError
from payload.stack.cluster_identity import (
    IDENTITY_LABEL,
    recorded_cluster_identity,
    resolve_cluster_identity,
)
from payload.stack.resource_labels import CLUSTER_LABEL, EXPIRES_LABEL

_UNIX_S = re.compile(r"[0-9]{1,11}")

IGNORED = ("description",)
"""Value of `ignore_changes` for resources with a description from `mark`."""


def program_identity(root: Path, cluster: str) -> str:
    """Return the identity of the stack's cluster; a preview does not store a new identity.

    `root` is the project's folder. Raises ConfigError, for example if this user has not signed
    identity.json. With a foreign identity.json, a build could treat another user's resources as
    this user's.
    """
    is_preview = pulumi.runtime.is_dry_run()
    recorded, is_proven = recorded_cluster_identity(root, cluster)
    if not is_preview and recorded is not None and not is_proven:
        raise ConfigError(
            f".cluster/{cluster}/identity.json: nothing on this machine proves that this file is "
            "yours: it may come from a clone or an older version. If the cluster is yours, run "
            "tileforge up --dry-run and type the cluster's name."
        )
    return resolve_cluster_identity(root, cluster, stack=pulumi.get_stack(), writes=not is_preview)


def cluster_labels(
    *, cluster: str, identity: str, expires_unix: int, extra: dict[str, str]
) -> dict[str, str]:
    """Return the labels for a resource that costs money or can be left behind."""
    own = {CLUSTER_LABEL: cluster, IDENTITY_LABEL: identity, EXPIRES_LABEL: str(expires_unix)}
    own["managed-by"] = "pulumi"
    return extra | own


def mark(labels: dict[str, str], text: str = "") -> str:
    """Return a description with `text` and the labels, for a resource that cannot have labels.

    Pass IGNORED as the resource's `ignore_changes`, because the expiry differs on each run. A
    changed description would make Pulumi replace some resources, such as the network with all
    machines.
    """
    own = " ".join(
        f"{name}={labels[name]}" for name in (CLUSTER_LABEL, IDENTITY_LABEL, EXPIRES_LABEL)
    )
    return f"{text}. {own}" if text else own


def last_expiry(labels: Sequence[dict[str, str] | None]) -> str:
    """Return the latest expiry of machines with these labels: ISO 8601, UTC.

    A label that was changed by hand to an invalid value counts as expired.
    """
    texts = [str((found or {}).get(EXPIRES_LABEL)) for found in labels]
    latest = max((int(text) for text in texts if _UNIX_S.fullmatch(text)), default=0)
    return datetime.fromtimestamp(latest, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
