"""Lists and removes Filestore instances of a project."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from payload.core.errors import CloudAuthError, CloudError
from payload.core.one_line import joined_lines
from payload.core.validation.fields import checked
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.removal_order import (
    Resource,
    last_segment,
    parse_time,
    printable_labels,
)
from payload.orchestrate.clouds.gcp.resource_kinds import FILESTORE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    capacity_gb: str | None = checked(None, key="capacityGb", pattern=re.compile("[0-9]{1,9}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attached:
    network: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filestore:
    name: str = checked(
        pattern=re.compile(r"projects/[\w.:-]+/locations/[a-z0-9-]+/instances/[a-z0-9-]+", re.A),
        wanted="an instance's name",
    )
    labels: dict[str, str] = field(default_factory=dict)
    create_time: str | None = checked(None, key="createTime")
    state: str = ""
    networks: tuple[_Attached, ...] = ()
    shares: tuple[_Share, ...] = checked((), key="fileShares")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FilestorePage:
    instances: tuple[_Filestore, ...] = ()
    unreachable: tuple[str, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    name: str = checked(
        pattern=re.compile(r"projects/[\w:-]+/locations/[\w-]+/operations/[\w.:-]+", re.A),
        wanted="an operation's name",
    )
    done: bool = False
    error: _Status | None = None


def filestores(google: Google) -> Iterator[Resource]:
    """Yield the project's Filestore instances; yield nothing if the API is disabled.

    Raises CloudError for unreachable locations, after yielding the instances in all other
    locations.
    """
    path = f"/v1/projects/{google.project}/locations/-/instances?pageSize=100"
    what = "listing Filestore instances"
    silent: set[str] = set()
    try:
        for page in google.get_pages("file", path, what=what, shape=_FilestorePage):
            silent.update(page.unreachable)
            yield from map(_filestore, page.instances)
    except CloudAuthError as error:
        if "Enable it" not in str(error):
            raise
    if silent:
        places = joined_lines(", ".join(sorted(last_segment(place) for place in silent)))
        raise CloudError(f"{what}: {places} does not respond. Try again.")


def _filestore(found: _Filestore) -> Resource:
    sizes = [int(share.capacity_gb) for share in found.shares if share.capacity_gb]
    return Resource(
        kind=FILESTORE,
        name=last_segment(found.name),
        location=found.name.split("/")[3],
        labels=printable_labels(found.labels),
        created_unix=parse_time(found.create_time),
        network=last_segment(found.networks[0].network) or None if found.networks else None,
        status=found.state or None,
        gib=sum(sizes) if sizes else None,
    )


def begin_to_remove_filestore(google: Google, resource: Resource) -> Callable[[], None]:
    """Request the removal of the instance; return a function that waits until it is gone.

    Raises the errors of Google.call.
    """
    what = f"removing {FILESTORE} {resource.name}"
    path = f"/v1/projects/{google.project}/locations/{resource.location}/instances/{resource.name}"
    begun = google.begin_to_delete("file", path, what=what, shape=_Operation)
    ends = time.monotonic() + _FILESTORE_S

    def wait() -> None:
        operation = begun
        while not operation.done:
            if time.monotonic() > ends:
                raise CloudError(
                    f"{what}: not finished after {_FILESTORE_S:g} s. Repeat the command later."
                )
            time.sleep(_FILESTORE_PAUSE_S)
            operation = google.get("file", f"/v1/{operation.name}", what=what, shape=_Operation)
        if operation.error is not None:
            raise CloudError(f"{what}: {joined_lines(operation.error.message)}")

    return wait


# Filestore's operations take minutes, and Google's API has no request that waits for them.
_FILESTORE_S, _FILESTORE_PAUSE_S = 900.0, 2.0
