"""The results bucket, which outlives the cluster, and the nodes' permissions on it."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi import ComponentResource, Input, Output, Resource, ResourceOptions
from pulumi_gcp import storage

from payload.stack.resource_labels import EXPIRES_LABEL, KEPT_LABEL

ROLE = "roles/storage.objectUser"
"""Permits reading, writing and deleting objects, but nothing on the bucket itself."""
RUNS = "runs/"
"""Prefix of the objects that nodes can access. `storage.results = "auto"` means
gs://BUCKET/runs."""
KEPT_S = 7 * 86_400
"""Time for which a deleted or overwritten object can be restored, and is billed. Nodes can neither
shorten this time nor delete such an object permanently. They could delete object versions, so the
bucket has no versioning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageArgs:
    """Arguments of ResultsBucket."""

    cluster: str
    region: str
    bucket: str
    """`create`, `none`, or the name of an existing bucket."""
    kms_key: str
    """The encryption key; empty to use Google's key."""
    labels: dict[str, str]
    node_account: Input[str]
    after: tuple[Resource, ...]
    """Resources that the bucket depends on, such as the permission to use its key."""


class ResultsBucket(ComponentResource):
    """The results bucket: a new bucket, an existing bucket, or no bucket."""

    bucket: Output[str] | None

    def __init__(self, name: str, args: StorageArgs, opts: ResourceOptions | None = None) -> None:
        """Create the bucket, and the nodes' permission on its objects, under `name`."""
        super().__init__("tileforge:infra:ResultsBucket", name, {}, opts)
        self.bucket = self._bucket(args)
        if self.bucket is not None:
            storage.BucketIAMMember(
                f"{args.cluster}-results-access",
                bucket=self.bucket,
                role=ROLE,
                member=Output.concat("serviceAccount:", args.node_account),
                condition=storage.BucketIAMMemberConditionArgs(
                    title="runs-only",
                    description="Objects of runs; of others the names alone",
                    expression=self.bucket.apply(runs_only),
                ),
                opts=ResourceOptions(parent=self),
            )
        self.register_outputs({"bucket": self.bucket})

    def _bucket(self, args: StorageArgs) -> Output[str] | None:
        if args.bucket == "none":
            return None
        if args.bucket != "create":
            return Output.from_input(args.bucket)
        # Pulumi appends a random suffix to the name, so a kept bucket does not prevent creating the
        # next one.
        created = storage.Bucket(
            f"{args.cluster}-results",
            location=args.region,
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            force_destroy=False,
            versioning=storage.BucketVersioningArgs(enabled=False),
            soft_delete_policy=storage.BucketSoftDeletePolicyArgs(
                retention_duration_seconds=KEPT_S
            ),
            lifecycle_rules=_lifecycle(),
            encryption=_encryption(args.kms_key),
            labels=args.labels | {KEPT_LABEL: "true"},
            opts=ResourceOptions(
                parent=self,
                depends_on=args.after,
                # Not protected, because protection would make `pulumi destroy` fail for all
                # resources.
                retain_on_delete=True,
                ignore_changes=[f'labels["{EXPIRES_LABEL}"]'],
            ),
        )
        return created.name


def runs_only(bucket: str) -> str:
    """Return the IAM condition that limits a node's ROLE to objects below `RUNS`.

    The condition cannot limit listing: permission to list applies to the whole bucket.
    https://cloud.google.com/iam/docs/conditions-attribute-reference
    """
    return (
        'resource.type != "storage.googleapis.com/Object" || '
        f'resource.name.startsWith("projects/_/buckets/{bucket}/objects/{RUNS}")'
    )


def _lifecycle() -> list[storage.BucketLifecycleRuleArgs]:
    """Return rules that delete unfinished uploads after a day, and old versions after a week.

    Buckets of older releases have object versions.
    """
    return [
        storage.BucketLifecycleRuleArgs(
            action=storage.BucketLifecycleRuleActionArgs(type="Delete"),
            condition=storage.BucketLifecycleRuleConditionArgs(
                days_since_noncurrent_time=7, with_state="ARCHIVED"
            ),
        ),
        storage.BucketLifecycleRuleArgs(
            action=storage.BucketLifecycleRuleActionArgs(type="AbortIncompleteMultipartUpload"),
            condition=storage.BucketLifecycleRuleConditionArgs(age=1),
        ),
    ]


def _encryption(kms_key: str) -> storage.BucketEncryptionArgs | None:
    return storage.BucketEncryptionArgs(default_kms_key_name=kms_key) if kms_key else None


def bucket_output(results: ResultsBucket) -> pulumi.Output[str | None]:
    """Return an output with the bucket's name, or None without a bucket."""
    return Output.from_input(results.bucket)
