"""Imports what a run of the program would import: seconds, which the forks of a server save."""

from __future__ import annotations

from pulumi_gcp import compute, dns, filestore, kms, organizations, serviceaccount, storage

import tests.engine.fake_pulumi.program as program

# pulumi_gcp loads each of its packages when something in it is first read.
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
