"""Patterns of names in Google Cloud."""

from __future__ import annotations

import re

CLOUD_NAME = re.compile(r"[a-z0-9][a-z0-9._:@-]{0,252}")
"""Any name of a resource, a location or an account."""
REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")
KMS_KEY = re.compile(
    r"projects/(?P<project>[\w:.-]+)/locations/(?P<location>[\w-]+)/keyRings/(?P<ring>[\w-]+)"
    r"/cryptoKeys/(?P<key>[\w-]+)",
    re.ASCII,
)
"""Full name of a Cloud KMS key."""
KMS_ROLE = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
"""Role to encrypt and decrypt with the key, without access to the key itself."""
