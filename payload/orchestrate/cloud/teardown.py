"""`pulumi destroy`, the removal of what it does not know, and the proof that nothing is left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import quote

from payload.errors import (
    CloudAuthError,
    CloudError,
    ConfigError,
    TeardownError,
    TileforgeError,
)
from payload.orchestrate.cloud.asks import confirm
from payload.orchestrate.cloud.failures import StackBusyError, explain
from payload.orchestrate.cloud.google import CloudMissingError, Google
from payload.orchestrate.cloud.listing import remove
from payload.orchestrate.cloud.operations import Operations
from payload.orchestrate.cloud.ownership import carrying_label
from payload.orchestrate.cloud.resources import CLOUD_NAME, CLUSTER_LABEL, KEPT_LABEL
from payload.orchestrate.cloud.sweep import Sweep, conclude, look
from payload.orchestrate.console import text_console
from payload.untrusted import checked, shown

_DIGITS = re.compile("[0-9]{1,19}")
_DELETES_AT_ONCE = 8
# Buckets of older releases are protected: without the flag nothing at all would be destroyed.
_WORDS = ("destroy", "--yes", "--skip-preview", "--exclude-protected")


def destroy_and_look(operations: Operations, google: Google, *, steps: int) -> None:
    """Destroy and look, as the last two of so many steps; look also when the destroy has failed.

    What carries the cluster's label and is left is removed after a question. Raises TeardownError
    when something is left, or when it cannot be shown that nothing is.
    """
    talk = operations.talk
    trouble = _destroy(operations)
    talk.print(f"{steps - 1}/{steps} destroy: " + (f"FAILED: {trouble}" if trouble else "done"))
    found = _look(operations, google)
    # While somebody else builds, what is not in the stack is about to be.
    if not isinstance(trouble, StackBusyError):
        removed = _remove_labelled(operations, google, found)
        if trouble is not None and (removed or not found.left):
            trouble = _destroy(operations)
        if removed:
            found = _look(operations, google)
    if found.left:
        text_console(stderr=False).print(found.table())
    try:
        conclude(found, talk=talk)
    except TeardownError as error:
        talk.print(f"{steps}/{steps} sweep: not clean")
        raise TeardownError(f"{error}{f' ({trouble})' if trouble else ''}") from None
    talk.print(f"{steps}/{steps} sweep: clean")
    if trouble is not None:
        raise TeardownError(
            f"nothing of the cluster was found, but {trouble}. See `pulumi stack`, then: pulumi "
            "refresh && pulumi destroy"
        )


def _destroy(operations: Operations) -> TileforgeError | None:
    update = operations.run(*_WORDS)
    return explain(update) if update.status != 0 else None


def _look(operations: Operations, google: Google) -> Sweep:
    cluster = operations.cluster
    try:
        return look(google, cluster, folder=operations.folder, keep_buckets=True)
    except (CloudError, CloudAuthError) as error:
        again = f"sweep --cluster {cluster} --project {google.project}"
        raise TeardownError(
            f"it is not known what is left of {cluster}: {error} Look: {again}"
        ) from None


def _remove_labelled(operations: Operations, google: Google, found: Sweep) -> bool:
    """Remove what is left with the cluster's own label, after a question; False for nothing."""
    going = carrying_label(found.all_left(), operations.cluster)
    if not going:
        return False
    operations.talk.print(
        f"left with the label of {operations.cluster}: "
        + ", ".join(f"{each.kind} {each.name}" for each in going)
    )
    if not confirm(f"Remove these {len(going)}?", assume_yes=operations.assume_yes):
        return False
    for reason in remove(google, going):
        operations.talk.print(f"warning: {reason}")
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A results bucket that the operator wants gone."""

    name: str
    num_objects: int
    """Old versions are counted, too."""
    size_bytes: int

    def __str__(self) -> str:
        size = f"{self.size_bytes / 2**30:.1f} GiB" if self.size_bytes else "empty"
        return f"gs://{self.name} ({self.num_objects} objects, {size})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketAnswer:
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Object:
    name: str
    generation: str = checked(pattern=_DIGITS, wanted="an integer as text")
    size: str = checked("0", pattern=_DIGITS, wanted="an integer as text")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ObjectPage:
    items: tuple[_Object, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


def find_bucket(google: Google, name: str, *, cluster: str) -> Bucket:
    """Return the cluster's results bucket of this name, with its size.

    Raises ConfigError for one that is not the cluster's, and as Google.ask does.
    """
    what = f"bucket {shown(name)}"
    if not CLOUD_NAME.fullmatch(name):
        raise ConfigError(f"--delete-bucket {shown(name)}: must be a bucket's name, without gs://.")
    try:
        found = google.get("storage", f"/storage/v1/b/{name}", what=what, shape=_BucketAnswer)
    except CloudMissingError:
        raise ConfigError(
            f"--delete-bucket {name}: there is no such bucket. See what is there: sweep --cluster "
            f"{cluster} --project {google.project}"
        ) from None
    if found.labels.get(CLUSTER_LABEL) != cluster or KEPT_LABEL not in found.labels:
        raise ConfigError(
            f"--delete-bucket {name}: it is no results bucket of cluster {cluster}, by its labels, "
            f"so it stays. Delete it by hand: gcloud storage rm --recursive gs://{name}"
        )
    sizes = [int(each.size) for each in _objects(google, name)]
    return Bucket(name=name, num_objects=len(sizes), size_bytes=sum(sizes))


def delete_bucket(google: Google, bucket: Bucket) -> None:
    """Delete the bucket and all that is in it. Raises TeardownError when something stays."""
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
            f"the cluster is gone, but its bucket is not: {error} By hand: gcloud storage rm "
            f"--recursive gs://{bucket.name}"
        ) from None


def _objects(google: Google, bucket: str) -> Iterator[_Object]:
    path = f"/storage/v1/b/{bucket}/o?versions=true&maxResults=1000"
    pages = google.get_pages("storage", path, what=f"listing gs://{bucket}", shape=_ObjectPage)
    return (each for page in pages for each in page.items)
