"""Imports the modules of a program run, which takes seconds, for the forks of a server."""

from __future__ import annotations

from pulumi_gcp import compute, dns, filestore, kms, organizations, serviceaccount, storage

import tests.engine.fake_pulumi.program as program

# pulumi_gcp loads each of its packages at the first access.
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
