"""Permissions for Google's service agents that encrypt cluster data with the operator's key."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi import ComponentResource, Output, ResourceOptions
from pulumi_gcp import kms, organizations, storage

from payload.stack.google_name_patterns import KMS_ROLE


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAccessArgs:
    """Arguments of KeyAccess."""

    cluster: str
    project: str
    kms_key: str
    makes_bucket: bool
    makes_filestore: bool


class KeyAccess(ComponentResource):
    """The permissions that disks, a bucket and a Filestore instance with `kmsKey` need.

    Only the project's Google service agents use the key, not the nodes or the operator.
    https://cloud.google.com/compute/docs/disks/customer-managed-encryption,
    https://cloud.google.com/storage/docs/encryption/using-customer-managed-keys and
    https://cloud.google.com/filestore/docs/cmek
    """

    def __init__(self, name: str, args: KeyAccessArgs, opts: ResourceOptions | None = None) -> None:
        """Create the permissions under `name`."""
        super().__init__("tileforge:infra:KeyAccess", name, {}, opts)
        invoke = pulumi.InvokeOptions(parent=self)
        number = organizations.get_project_output(project_id=args.project, opts=invoke).number
        self._grant(
            f"{args.cluster}-key-compute",
            args.kms_key,
            Output.concat("service-", number, "@compute-system.iam.gserviceaccount.com"),
        )
        if args.makes_bucket:
            # Google creates this service agent on the first request for its name.
            agent = storage.get_project_service_account_output(project=args.project, opts=invoke)
            self._grant(f"{args.cluster}-key-storage", args.kms_key, agent.email_address)
        if args.makes_filestore:
            self._grant(
                f"{args.cluster}-key-filestore",
                args.kms_key,
                Output.concat("service-", number, "@cloud-filer.iam.gserviceaccount.com"),
            )
        self.register_outputs({"kms_key": args.kms_key})

    def _grant(self, name: str, kms_key: str, email: Output[str]) -> None:
        # Retained, because the bucket outlives the cluster and cannot be read without this
        # permission, and because other clusters of the project can use the same key.
        kms.CryptoKeyIAMMember(
            name,
            crypto_key_id=kms_key,
            role=KMS_ROLE,
            member=Output.concat("serviceAccount:", email),
            opts=ResourceOptions(parent=self, retain_on_delete=True),
        )
