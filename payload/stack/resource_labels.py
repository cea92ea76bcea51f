"""CONTRACT: labels of a cluster's cloud resources, in addition to the identity."""

from __future__ import annotations

CLUSTER_LABEL = "tileforge-cluster"
EXPIRES_LABEL = "tileforge-expires"
"""Label with the time of expiry in Unix seconds."""
KEPT_LABEL = "tileforge-kept"
"""Label of resources that `pulumi destroy` keeps: the results bucket."""
