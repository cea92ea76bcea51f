"""Imports the program's modules, which saves seconds in each fork of a server."""

from __future__ import annotations

from pulumi_gcp import compute, dns, filestore, kms, organizations, serviceaccount, storage

import tests.engine.fake_pulumi.program as program

# pulumi_gcp loads each package on first access.
LOADED = (
    program.run,
    compute.Instance,
    dns.ManagedZone,
    filestore.Instance,
    kms.CryptoKeyIAMMember,
    organizations.get_project,
    serviceaccount.Account,
    storage.Bucket,
)
