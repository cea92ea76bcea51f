"""Labels by which everything that costs can be found, and its end known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

CLUSTER = "tileforge-cluster"
EXPIRES = "tileforge-expires"
"""Unix seconds."""
KEPT = "tileforge-kept"
"""On what outlives `pulumi destroy` on purpose: the results bucket."""

_UNIX_S = re.compile(r"[0-9]{1,11}")

IGNORED = ("description",)
"""For `ignore_changes`, wherever the description is a `mark`."""


def cluster_labels(*, cluster: str, expires_unix: int, extra: dict[str, str]) -> dict[str, str]:
    """Labels of a resource that costs or can leak."""
    own = {CLUSTER: cluster, EXPIRES: str(expires_unix), "managed-by": "pulumi"}
    return extra | own


def mark(labels: dict[str, str], text: str = "") -> str:
    """The description of what cannot have labels: `text`, then the same two of them.

    Some kinds are rebuilt, network and machines with them, when their description changes, and
    the expiry is another one each time that the program runs: so IGNORED goes with it.
    """
    own = " ".join(f"{name}={labels[name]}" for name in (CLUSTER, EXPIRES))
    return f"{text}. {own}" if text else own


def last_expiry(labels: Sequence[dict[str, str] | None]) -> str:
    """Return when the last of the machines with these labels has ended: ISO 8601, UTC.

    What was changed by hand to something else than Unix seconds counts as ended.
    """
    texts = [str((found or {}).get(EXPIRES)) for found in labels]
    latest = max((int(text) for text in texts if _UNIX_S.fullmatch(text)), default=0)
    return datetime.fromtimestamp(latest, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
