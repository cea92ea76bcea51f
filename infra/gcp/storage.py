"""The results bucket, which outlives the cluster, and what the nodes may do in it."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi import ComponentResource, Input, Output, Resource, ResourceOptions
from pulumi_gcp import storage

from payload.stack.resource_labels import EXPIRES_LABEL, KEPT_LABEL

ROLE = "roles/storage.objectUser"
"""Read, write and delete objects; nothing about the bucket itself."""
RUNS = "runs/"
"""Objects that the nodes may do that to: `auto` of storage.results is gs://BUCKET/runs."""
KEPT_S = 7 * 86_400
"""For so long an object that was deleted or overwritten can be restored, and is billed. A node's
role can neither end that time nor delete what is kept, as it could with object versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageArgs:
    """Arguments of a bucket."""

    cluster: str
    region: str
    bucket: str
    """`create`, `none`, or the name of one that exists."""
    kms_key: str
    """Empty: Google's own key."""
    labels: dict[str, str]
    node_account: Input[str]
    after: tuple[Resource, ...]
    """Resources that the bucket depends on: the right to use its key."""


class ResultsBucket(ComponentResource):
    """A bucket that is made, one that exists, or none."""

    bucket: Output[str] | None

    def __init__(self, name: str, args: StorageArgs, opts: ResourceOptions | None = None) -> None:
        """Make it, and the nodes' right to its objects, under `name`."""
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
        # Its name gets an ending of Pulumi's: a bucket that was kept does not stand in the way of
        # the next one.
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
                # Not protected: that would keep `pulumi destroy` from everything else, too.
                retain_on_delete=True,
                ignore_changes=[f'labels["{EXPIRES_LABEL}"]'],
            ),
        )
        return created.name


def runs_only(bucket: str) -> str:
    """Return the IAM condition under which a node has ROLE in the bucket.

    Whoever may list a bucket's objects may list all: that permission is the bucket's own.
    https://cloud.google.com/iam/docs/conditions-attribute-reference
    """
    return (
        'resource.type != "storage.googleapis.com/Object" || '
        f'resource.name.startsWith("projects/_/buckets/{bucket}/objects/{RUNS}")'
    )


def _lifecycle() -> list[storage.BucketLifecycleRuleArgs]:
    """Return rules that delete unfinished uploads after a day, and versions after a week.

    A bucket of an older release has versions from before.
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
    """The bucket's name as an output, also when there is none."""
    return Output.from_input(results.bucket)
