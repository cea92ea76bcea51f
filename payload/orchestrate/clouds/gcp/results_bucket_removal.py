"""Finds and deletes a cluster's results bucket."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote

from payload.core.errors import (
    CloudAuthError,
    CloudError,
    ConfigError,
    TeardownError,
)
from payload.core.printable_text import shown
from payload.core.suggested_commands import command
from payload.core.validation.fields import checked
from payload.orchestrate.clouds.gcp.buckets import bucket_in
from payload.orchestrate.clouds.gcp.client import CloudMissingError, Google
from payload.orchestrate.clouds.gcp.ownership import (
    Ownership,
)
from payload.stack.cluster_identity import (
    identity_in,
)
from payload.stack.google_name_patterns import CLOUD_NAME
from payload.stack.resource_labels import CLUSTER_LABEL, KEPT_LABEL

_DIGITS = re.compile("[0-9]{1,19}")
_DELETES_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A results bucket that the operator requested to delete."""

    name: str
    num_objects: int
    """Number of objects, including old versions."""
    size_bytes: int

    def __str__(self) -> str:
        size = f"{self.size_bytes / 2**30:.1f} GiB" if self.size_bytes else "empty"
        return f"gs://{self.name} ({self.num_objects} objects, {size})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Object:
    name: str
    generation: str = checked(pattern=_DIGITS, wanted="an integer as text")
    size: str = checked("0", pattern=_DIGITS, wanted="an integer as text")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ObjectPage:
    items: tuple[_Object, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


def find_bucket(google: Google, name: str, *, cluster: str, own: Ownership) -> Bucket:
    """Return the cluster's results bucket of this name, with its size.

    A bucket created by an older version has no identity and is recognized by its labels. Raises
    ConfigError for a bucket that does not belong to the cluster, and the errors of Google.call.
    """
    what = f"bucket {shown(name)}"
    if not CLOUD_NAME.fullmatch(name):
        raise ConfigError(f"--delete-bucket {shown(name)}: must be a bucket's name, without gs://.")
    found = bucket_in(google, name, what=what)
    if found is None:
        raise ConfigError(
            f"--delete-bucket {name}: not found in project {google.project}. List the cluster's "
            "resources: "
            + command("orchestrate", "sweep", "--cluster", cluster, "--project", google.project)
        )
    identity = identity_in(found.labels)
    is_own = identity is None or identity in own.identities
    labelled = found.labels.get(CLUSTER_LABEL) == cluster and KEPT_LABEL in found.labels
    if not (is_own and labelled):
        problem = f"do not mark it as a results bucket of cluster {cluster}"
        if labelled:
            problem = f"have the identity {identity} of a different cluster {cluster}"
        raise ConfigError(
            f"--delete-bucket {name}: its labels {problem}, so the bucket is kept. To delete it: "
            f"gcloud storage rm --recursive gs://{name}"
        )
    sizes = [int(each.size) for each in _objects(google, name)]
    return Bucket(name=name, num_objects=len(sizes), size_bytes=sum(sizes))


def delete_bucket(google: Google, bucket: Bucket) -> None:
    """Delete the bucket and all its objects. Raises TeardownError if a deletion fails."""
    path, what = f"/storage/v1/b/{bucket.name}", f"deleting gs://{bucket.name}"

    def delete(each: _Object) -> None:
        with suppress(CloudMissingError):
            named = f"{path}/o/{quote(each.name, safe='')}?generation={each.generation}"
            google.delete("storage", named, what=what)

    try:
        with ThreadPoolExecutor(max_workers=_DELETES_AT_ONCE) as pool:
            list(pool.map(delete, list(_objects(google, bucket.name))))
        google.delete("storage", path, what=what)
    except (CloudError, CloudAuthError) as error:
        raise TeardownError(
            f"the cluster was destroyed, but not its bucket: {error} To delete it: gcloud storage "
            f"rm --recursive gs://{bucket.name}"
        ) from None


def _objects(google: Google, bucket: str) -> Iterator[_Object]:
    path = f"/storage/v1/b/{bucket}/o?versions=true&maxResults=1000"
    pages = google.get_pages("storage", path, what=f"listing gs://{bucket}", shape=_ObjectPage)
    return (each for page in pages for each in page.items)
