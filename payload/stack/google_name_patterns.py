"""Names that Google Cloud gives, and their patterns."""

from __future__ import annotations

import re

CLOUD_NAME = re.compile(r"[a-z0-9][a-z0-9._:@-]{0,252}")
"""Any name that Google gives to a resource, a place or an account."""
REGION = re.compile(r"[a-z]+-[a-z]+[0-9]+")
KMS_KEY = re.compile(
    r"projects/(?P<project>[\w:.-]+)/locations/(?P<location>[\w-]+)/keyRings/(?P<ring>[\w-]+)"
    r"/cryptoKeys/(?P<key>[\w-]+)",
    re.ASCII,
)
"""A Cloud KMS key by its full name."""
KMS_ROLE = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
"""Encrypt and decrypt with the key; nothing about the key itself."""
