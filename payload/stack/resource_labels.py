"""CONTRACT: labels of a cluster's resources in the cloud, beside that of its identity."""

from __future__ import annotations

CLUSTER_LABEL = "tileforge-cluster"
EXPIRES_LABEL = "tileforge-expires"
"""Unix seconds."""
KEPT_LABEL = "tileforge-kept"
"""On what outlives `pulumi destroy` on purpose: the results bucket."""
