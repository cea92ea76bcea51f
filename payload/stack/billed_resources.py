"""Resources that are still billed after a cluster's lifetime and after a run's limits."""

from __future__ import annotations

BILLED_RESOURCES = "NAT, addresses, buckets and Filestore"
"""Resources that stay when Google deletes the machines at the end of their lifetime."""
BILLED_ON = f"{BILLED_RESOURCES} remain billed until they are removed"
