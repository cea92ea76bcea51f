"""Labels by which everything that costs can be found, and its end known."""

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
    settle_cluster_identity,
)
from payload.stack.resource_labels import CLUSTER_LABEL, EXPIRES_LABEL

_UNIX_S = re.compile(r"[0-9]{1,11}")

IGNORED = ("description",)
"""For `ignore_changes`, wherever the description is a `mark`."""


def program_identity(root: Path, cluster: str) -> str:
    """Return the identity of the cluster that the stack builds; a preview makes none to keep.

    `root` is the project's folder. Raises ConfigError, also where the folder's file alone says the
    identity: what is built would prove that its other resources are this user's.
    """
    is_preview = pulumi.runtime.is_dry_run()
    recorded, is_proven = recorded_cluster_identity(root, cluster)
    if not is_preview and recorded is not None and not is_proven:
        raise ConfigError(
            f".cluster/{cluster}/identity.json: nothing shows that you have written it, as in a "
            "clone, or after an older version. If the cluster is yours, run tileforge up "
            "--dry-run and type the cluster's name."
        )
    return settle_cluster_identity(root, cluster, stack=pulumi.get_stack(), writes=not is_preview)


def cluster_labels(
    *, cluster: str, identity: str, expires_unix: int, extra: dict[str, str]
) -> dict[str, str]:
    """Labels of a resource that costs or can leak."""
    own = {CLUSTER_LABEL: cluster, IDENTITY_LABEL: identity, EXPIRES_LABEL: str(expires_unix)}
    own["managed-by"] = "pulumi"
    return extra | own


def mark(labels: dict[str, str], text: str = "") -> str:
    """The description of what cannot have labels: `text`, then the same three of them.

    Some kinds are rebuilt, network and machines with them, when their description changes, and
    the expiry is another one each time that the program runs: so IGNORED goes with it.
    """
    own = " ".join(
        f"{name}={labels[name]}" for name in (CLUSTER_LABEL, IDENTITY_LABEL, EXPIRES_LABEL)
    )
    return f"{text}. {own}" if text else own


def last_expiry(labels: Sequence[dict[str, str] | None]) -> str:
    """Return when the last of the machines with these labels has ended: ISO 8601, UTC.

    What was changed by hand to something else than Unix seconds counts as ended.
    """
    texts = [str((found or {}).get(EXPIRES_LABEL)) for found in labels]
    latest = max((int(text) for text in texts if _UNIX_S.fullmatch(text)), default=0)
    return datetime.fromtimestamp(latest, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
