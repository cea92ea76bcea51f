"""Lists and finds the buckets of a project."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

from payload.core.validation.fields import checked
from payload.orchestrate.clouds.gcp.client import (
    MOST_PAGES,
    REQUEST_S,
    Google,
    too_many_pages,
)
from payload.orchestrate.clouds.gcp.removal_order import (
    PAGE,
    Resource,
    checked_name,
    printable_labels,
)
from payload.orchestrate.clouds.gcp.resource_kinds import BUCKET


def buckets(google: Google) -> Iterator[Resource]:
    """Yield the project's buckets. Raises the errors of Google.call."""
    client = google.storage()
    token: str | None = None

    def next_page(token: str | None) -> tuple[list[Resource], str | None]:
        listed = client.list_buckets(
            max_results=PAGE, page_token=token, timeout=REQUEST_S, retry=None
        )
        # Convert the buckets within the call: the library parses their fields on access, and the
        # fields can be damaged.
        return [_bucket(each) for each in next(listed.pages)], listed.next_page_token

    for _ in range(MOST_PAGES):
        buckets, token = google.call("listing buckets", partial(next_page, token))
        yield from buckets
        if not token:
            return
    raise too_many_pages("listing buckets")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBucket:
    """A bucket of the project."""

    name: str
    location: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketPage:
    items: tuple[FoundBucket, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


def bucket_in(google: Google, name: str, *, what: str) -> FoundBucket | None:
    """Return the bucket of this name in the project, or None.

    A bucket of this name in another project is ignored, because any project can reuse the name of a
    deleted bucket. Raises the errors of Google.call.
    """
    path = f"/storage/v1/b?project={google.project}&prefix={quote(name)}&maxResults=100"
    pages = google.get_pages("storage", path, what=what, shape=_BucketPage)
    return next((each for page in pages for each in page.items if each.name == name), None)


def _bucket(bucket: Any) -> Resource:
    created = bucket.time_created
    location = bucket.location or "global"
    return Resource(
        kind=BUCKET,
        name=checked_name(bucket.name, BUCKET),
        location=checked_name(location.lower(), f"{BUCKET} {bucket.name}: location"),
        labels=printable_labels(bucket.labels),
        created_unix=created.timestamp() if created else None,
    )
