"""Address ranges of Google's services."""

from __future__ import annotations

# https://cloud.google.com/iap/docs/using-tcp-forwarding
IAP_RANGE = "35.235.240.0/20"
"""Source addresses of Google's Identity-Aware Proxy."""
# https://cloud.google.com/vpc-service-controls/docs/private-connectivity
RESTRICTED = "199.36.153.4/30"
"""Addresses of restricted.googleapis.com, which serves the Google APIs that VPC Service Controls
supports. They are not announced to the internet; the VPC's default route reaches them."""
