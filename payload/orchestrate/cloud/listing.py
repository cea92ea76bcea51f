"""Lists and removes what is in a project, through Google's client libraries and interfaces."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any
from urllib.parse import quote

from payload.core.errors import CloudAuthError, CloudError, TileforgeError
from payload.core.one_line import joined_lines
from payload.core.validation import checked, shown
from payload.orchestrate.cloud.google import (
    MOST_PAGES,
    REQUEST_S,
    CloudMissingError,
    Google,
    UnreadableError,
    endless,
    request_of,
)
from payload.orchestrate.cloud.resources import (
    BUCKET,
    CLUSTER_LABEL,
    DNS_ZONE,
    FILESTORE,
    KINDS,
    RUNNING,
    SERVICE_ACCOUNT,
    Kind,
    Resource,
    in_order,
    is_zone,
    last_word,
    marks,
    parse_time,
    printable_labels,
)
from payload.stack.cloud_need import CLOUD_NAME

# infra/identity.py gives it, from the first on; descriptions came later.
_DISPLAYED = re.compile(r"Nodes of the Tileforge cluster ([a-z0-9-]+)")
# Every zone has these; they go with it.
_OWN_RECORDS = ("NS", "SOA")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Account:
    email: str = checked(pattern=CLOUD_NAME, wanted="an e-mail address")
    display_name: str = checked("", key="displayName")
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AccountPage:
    accounts: tuple[_Account, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Zone:
    name: str = checked(pattern=CLOUD_NAME, wanted="a zone's name")
    labels: dict[str, str] = field(default_factory=dict)
    creation_time: str | None = checked(None, key="creationTime")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ZonePage:
    zones: tuple[_Zone, ...] = checked((), key="managedZones")
    next_page_token: str = checked("", key="nextPageToken")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    name: str
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordPage:
    rrsets: tuple[_Record, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


def service_accounts(google: Google) -> Iterator[Resource]:
    """Yield those of clusters; an account's name alone says little, so others are left out."""
    path, what = f"/v1/projects/{google.project}/serviceAccounts?pageSize=100", "service accounts"
    for page in google.get_pages("iam", path, what=f"listing {what}", shape=_AccountPage):
        for account in page.accounts:
            labels = marks(account.description)
            shown = _DISPLAYED.fullmatch(account.display_name)
            if shown and CLUSTER_LABEL not in labels:
                labels[CLUSTER_LABEL] = shown[1]
            yield Resource(
                kind=SERVICE_ACCOUNT, name=account.email, location="global", labels=labels
            )


def remove_service_account(google: Google, email: str) -> None:
    """Remove one; it is gone at once. Raises as Google.ask does."""
    path = f"/v1/projects/{google.project}/serviceAccounts/{quote(email)}"
    google.delete("iam", path, what=f"removing {SERVICE_ACCOUNT} {email}")


def dns_zones(google: Google) -> Iterator[Resource]:
    """Yield the project's zones; where the API is off, as in most projects, there are none."""
    path = f"/dns/v1/projects/{google.project}/managedZones?maxResults=100"
    try:
        for page in google.get_pages("dns", path, what="listing DNS zones", shape=_ZonePage):
            for zone in page.zones:
                yield Resource(
                    kind=DNS_ZONE,
                    name=zone.name,
                    location="global",
                    labels=printable_labels(zone.labels),
                    created_unix=parse_time(zone.creation_time),
                )
    except CloudAuthError as error:
        if "Enable it" not in str(error):
            raise


def remove_dns_zone(google: Google, name: str) -> None:
    """Remove one with its records; it is gone at once. Raises as Google.ask does."""
    what = f"removing {DNS_ZONE} {name}"
    zone = f"/dns/v1/projects/{google.project}/managedZones/{quote(name)}"
    pages = google.get_pages("dns", f"{zone}/rrsets?maxResults=100", what=what, shape=_RecordPage)
    for record in [each for page in pages for each in page.rrsets]:
        if record.type not in _OWN_RECORDS:
            with suppress(CloudMissingError):
                words = f"{quote(record.name, safe='')}/{quote(record.type, safe='')}"
                google.delete("dns", f"{zone}/rrsets/{words}", what=what)
    google.delete("dns", zone, what=what)


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
    """Yield the project's Filestore instances; where the API is off there are none.

    Raises CloudError for places that do not answer, after what was found.
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
        places = joined_lines(", ".join(sorted(last_word(place) for place in silent)))
        raise CloudError(f"{what}: {places} does not answer. Try again.")


def _filestore(found: _Filestore) -> Resource:
    sizes = [int(share.capacity_gb) for share in found.shares if share.capacity_gb]
    return Resource(
        kind=FILESTORE,
        name=last_word(found.name),
        location=found.name.split("/")[3],
        labels=printable_labels(found.labels),
        created_unix=parse_time(found.create_time),
        network=last_word(found.networks[0].network) or None if found.networks else None,
        status=found.state or None,
        gib=sum(sizes) if sizes else None,
    )


def begin_to_remove_filestore(google: Google, resource: Resource) -> Callable[[], None]:
    """Ask for the removal; what is returned waits for its end. Raises as Google.ask does."""
    what = f"removing {FILESTORE} {resource.name}"
    path = f"/v1/projects/{google.project}/locations/{resource.location}/instances/{resource.name}"
    begun = google.begin_to_delete("file", path, what=what, shape=_Operation)
    ends = time.monotonic() + _FILESTORE_S

    def see_to_its_end() -> None:
        operation = begun
        while not operation.done:
            if time.monotonic() > ends:
                raise CloudError(f"{what}: it is not done after {_FILESTORE_S:g} s. Look again.")
            time.sleep(_FILESTORE_PAUSE_S)
            operation = google.get("file", f"/v1/{operation.name}", what=what, shape=_Operation)
        if operation.error is not None:
            raise CloudError(f"{what}: {joined_lines(operation.error.message)}")

    return see_to_its_end


_OPERATION_S = 300.0
# Google's operations of Filestore take minutes, and are not held back until they are done.
_FILESTORE_S, _FILESTORE_PAUSE_S = 900.0, 2.0
# Google holds the answer back for up to two minutes, until the operation is done.
_WAIT_S = 150.0
_PAGE = 500
# Warnings of a list that is whole; without one the code is empty.
_WHOLE = ("", "NO_RESULTS_ON_PAGE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The resources that were found, and the places that could not be listed."""

    resources: Sequence[Resource]
    blind: Sequence[str]
    """Each a reason; empty when everything was seen."""


def list_everything(google: Google) -> Listing:
    """Return everything of every kind in all zones, buckets, DNS zones, and service accounts.

    Raises CloudAuthError when not even the first kind may be listed.
    """
    found: list[Resource] = []
    blind: list[str] = []
    # The first one alone: without credentials there is one error and not a dozen.
    first, *others = KINDS
    with _noted(blind, UnreadableError):
        found.extend(_of_kind(google, first, blind))
    ways = [partial(_of_kind, google, kind, blind) for kind in others]
    with ThreadPoolExecutor(max_workers=4) as pool:
        waiting = [
            pool.submit(_attempt, way, blind)
            for way in (*ways, *(partial(way, google) for way in _OTHERS))
        ]
        for each in waiting:
            found += each.result()
    return Listing(resources=found, blind=blind)


def list_machines(google: Google) -> list[Resource]:
    """Return the machines of all zones, whoever made them.

    Raises CloudError when a zone could not be listed, and CloudAuthError.
    """
    blind: list[str] = []
    found = list(_of_kind(google, KINDS[0], blind))
    if blind:
        raise CloudError(f"not every machine is seen: {'; '.join(blind)}")
    return found


def remove(google: Google, resources: Sequence[Resource]) -> list[str]:
    """Remove each, in order and to its end, but no bucket; returns what went wrong.

    Those of a kind go at once: each may take minutes, and machines cost until they are gone.
    """
    failed: list[str] = []
    going = in_order(each for each in resources if each.kind != BUCKET)
    for _, alike in groupby(going, key=lambda each: each.kind):
        ends: list[Callable[[], None]] = []
        for resource in alike:
            # Something else may have removed it, which is as good.
            with _noted(failed, TileforgeError), suppress(CloudMissingError):
                ends.append(_begin_to_remove(google, resource))
        for see_to_its_end in ends:
            with _noted(failed, TileforgeError), suppress(CloudMissingError):
                see_to_its_end()
    return failed


@contextmanager
def _noted(said: list[str], *errors: type[TileforgeError]) -> Iterator[None]:
    """Put the message of an error into `said` and go on."""
    try:
        yield
    except errors as error:
        said.append(str(error))


def _attempt(way: Callable[[], Iterator[Resource]], blind: list[str]) -> list[Resource]:
    """Return what was found before an error, too."""
    found: list[Resource] = []
    with _noted(blind, CloudError, CloudAuthError):
        found.extend(way())
    return found


def _of_kind(google: Google, kind: Kind, blind: list[str]) -> Iterator[Resource]:
    return (_aggregated if kind.aggregated else _global)(google, kind, blind)


def _aggregated(google: Google, kind: Kind, blind: list[str]) -> Iterator[Resource]:
    client = google.compute(kind.client)
    request = request_of(
        f"AggregatedList{kind.client}Request",
        project=google.project,
        max_results=_PAGE,
        # Else one zone that is down makes the whole list fail.
        return_partial_success=True,
    )
    what = f"listing {kind.gcloud}"
    for page in google.pages(what, client.aggregated_list, request):
        silent = {last_word(place) for place in page.unreachables}
        _see_warning(page.warning, what, blind)
        for scope, listed in page.items.items():
            place = last_word(scope)
            # A place that fails says so here; `unreachables` need not name it. gcloud looks here
            # (googlecloudsdk/api_lib/compute/request_helper.py).
            if place not in silent:
                _see_warning(listed.warning, f"{what}: {place}", blind)
            for item in getattr(listed, _snake(kind.client)):
                yield _resource(kind, item, location=place)
        blind += [f"{what}: {place} does not answer. Try again." for place in sorted(silent)]


def _global(google: Google, kind: Kind, blind: list[str]) -> Iterator[Resource]:
    client = google.compute(kind.client)
    request = request_of(f"List{kind.client}Request", project=google.project, max_results=_PAGE)
    what = f"listing {kind.gcloud}"
    for page in google.pages(what, client.list, request):
        _see_warning(page.warning, what, blind)
        for item in page.items:
            yield _resource(kind, item, location="global")


def _see_warning(warning: Any, what: str, blind: list[str]) -> None:
    if warning.code not in _WHOLE:
        said = joined_lines(warning.message).rstrip(".") or "no word"
        blind.append(f"{what}: {warning.code}: {said}. Try again.")


def _resource(kind: Kind, item: Any, *, location: str) -> Resource:
    labels = printable_labels(item.labels) if kind.labelled else marks(item.description)
    network = last_word(_network(item)) or None
    return Resource(
        kind=kind.name,
        name=_checked_name(item.name, kind.name),
        location=_checked_name(location, f"{kind.name} {item.name}: place"),
        labels=labels,
        created_unix=parse_time(item.creation_timestamp),
        network=None if kind.name == "network" else network,
        status=str(item.status) or None if kind.name in ("instance", "disk") else None,
        ends_unix=_end_of(item) if kind.name == "instance" else None,
    )


def _end_of(machine: Any) -> float | None:
    """Return when Google ends a machine that runs; None for one without a limit, or stopped.

    Google's terminationTimestamp is not in the library. It is this sum, from each start on:
    https://cloud.google.com/compute/docs/instances/limit-vm-runtime
    """
    started = parse_time(machine.last_start_timestamp or machine.creation_timestamp)
    limit_s = machine.scheduling.max_run_duration.seconds
    if machine.status not in RUNNING or started is None or not limit_s:
        return None
    return started + float(limit_s)


def _checked_name(name: str, what: str) -> str:
    """Return a name that Google can have given; it becomes a word of requests and commands."""
    if not CLOUD_NAME.fullmatch(name):
        raise CloudError(
            f"listing: {joined_lines(what)}: Google Cloud names one {shown(name)}, which is no "
            "name."
        )
    return name


def _network(item: Any) -> str:
    interfaces = getattr(item, "network_interfaces", None)
    if interfaces:
        return str(interfaces[0].network)
    return str(getattr(item, "network", "") or "")


def _buckets(google: Google) -> Iterator[Resource]:
    client = google.storage()
    token: str | None = None

    def next_page(token: str | None) -> tuple[list[Resource], str | None]:
        listed = client.list_buckets(
            max_results=_PAGE, page_token=token, timeout=REQUEST_S, retry=None
        )
        # Within the request: the library reads a bucket's fields, which may be damaged, only now.
        return [_bucket(each) for each in next(listed.pages)], listed.next_page_token

    for _ in range(MOST_PAGES):
        buckets, token = google.ask("listing buckets", partial(next_page, token))
        yield from buckets
        if not token:
            return
    raise endless("listing buckets")


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
    """Return the bucket of this name; None where the project has none, whoever else has one.

    The name of a bucket that is gone is anybody's to take. Raises as Google.ask does.
    """
    path = f"/storage/v1/b?project={google.project}&prefix={quote(name)}&maxResults=100"
    pages = google.get_pages("storage", path, what=what, shape=_BucketPage)
    return next((each for page in pages for each in page.items if each.name == name), None)


def _bucket(bucket: Any) -> Resource:
    created = bucket.time_created
    location = bucket.location or "global"
    return Resource(
        kind=BUCKET,
        name=_checked_name(bucket.name, BUCKET),
        location=_checked_name(location.lower(), f"{BUCKET} {bucket.name}: place"),
        labels=printable_labels(bucket.labels),
        created_unix=created.timestamp() if created else None,
    )


_OTHERS = (_buckets, service_accounts, dns_zones, filestores)


def _begin_to_remove(google: Google, resource: Resource) -> Callable[[], None]:
    """Ask for the removal; what is returned waits for its end."""
    for known, way in ((SERVICE_ACCOUNT, remove_service_account), (DNS_ZONE, remove_dns_zone)):
        if resource.kind == known:
            way(google, resource.name)
            return lambda: None
    if resource.kind == FILESTORE:
        return begin_to_remove_filestore(google, resource)
    kind = next(kind for kind in KINDS if kind.name == resource.kind)
    client_name, singular = kind.client, kind.singular
    place, operations = {"project": google.project}, "Global"
    if kind.aggregated and resource.location == "global":
        client_name, singular = f"Global{client_name}", f"Global{singular}"
    elif kind.aggregated:
        operations = "Zone" if is_zone(resource.location) else "Region"
        place[operations.lower()] = resource.location
    request = request_of(
        f"Delete{singular}Request", **place, **{_snake(kind.singular): resource.name}
    )
    client = google.compute(client_name)
    what = f"removing {kind.name} {resource.name}"
    operation = google.ask(
        what, lambda: client.delete_unary(request=request, retry=None, timeout=REQUEST_S)
    )
    ends = time.monotonic() + _OPERATION_S
    return partial(
        see_to_its_end, google, operation, what, operations=operations, place=place, ends=ends
    )


def see_to_its_end(
    google: Google,
    operation: Any,
    what: str,
    *,
    operations: str,
    place: dict[str, str],
    ends: float,
) -> None:
    """Wait until one of Compute Engine's operations is done, or until `ends` (monotonic, seconds).

    Raises CloudError when it fails or takes longer, and as Google.ask does.
    """
    # Not client.delete(): what it returns asks the public address, whatever api_endpoint says
    # (google-cloud-compute 1.48, _zone_operations_client).
    client = google.compute(f"{operations}Operations")
    request = request_of(f"Wait{operations}OperationRequest", operation=operation.name, **place)
    is_late = False
    # A status that the library does not know is a bare number.
    while getattr(operation.status, "name", "") != "DONE":
        if is_late:
            raise CloudError(f"{what}: it is not done after {_OPERATION_S:g} s. Look again later.")
        # Asked once even when the time is over, which others of its kind may have taken.
        is_late = time.monotonic() > ends
        operation = google.ask(
            what, lambda: client.wait(request=request, retry=None, timeout=_WAIT_S)
        )
    said = [joined_lines(error.message) for error in operation.error.errors]
    if said or operation.http_error_status_code:
        raise CloudError(f"{what}: {' '.join(said) or operation.http_error_message}")


def _snake(name: str) -> str:
    """Return `forwarding_rules` of ForwardingRules."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
