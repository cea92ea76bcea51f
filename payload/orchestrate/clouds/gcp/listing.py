"""Lists all resources of a project, in Compute Engine and in other services."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from payload.core.errors import CloudAuthError, CloudError, TileforgeError
from payload.core.one_line import joined_lines
from payload.orchestrate.clouds.gcp.buckets import buckets
from payload.orchestrate.clouds.gcp.client import Google, UnreadableError, request_of
from payload.orchestrate.clouds.gcp.dns_zones import dns_zones
from payload.orchestrate.clouds.gcp.filestore_instances import filestores
from payload.orchestrate.clouds.gcp.removal_order import (
    PAGE,
    Resource,
    checked_name,
    labels_in_description,
    last_segment,
    parse_time,
    printable_labels,
)
from payload.orchestrate.clouds.gcp.resource_kinds import KINDS, RUNNING, Kind
from payload.orchestrate.clouds.gcp.service_accounts import service_accounts

# Warning codes of a complete list; the code is empty if there is no warning.
_COMPLETE = ("", "NO_RESULTS_ON_PAGE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The resources that were found, and the reasons why other resources could not be listed."""

    resources: Sequence[Resource]
    blind: Sequence[str]
    """One reason for each failed list; empty if every list was complete."""


def list_everything(google: Google) -> Listing:
    """Return the resources of every kind in all zones and regions.

    Raises CloudAuthError if the first kind cannot be listed.
    """
    found: list[Resource] = []
    blind: list[str] = []
    # The first kind is listed alone, so that missing credentials cause a single error.
    first, *others = KINDS
    with collect_errors(blind, UnreadableError):
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
    """Return all machines of the project, in all zones.

    Raises CloudAuthError, and CloudError if a zone could not be listed.
    """
    blind: list[str] = []
    found = list(_of_kind(google, KINDS[0], blind))
    if blind:
        raise CloudError(f"not every machine could be listed: {'; '.join(blind)}")
    return found


@contextmanager
def collect_errors(messages: list[str], *errors: type[TileforgeError]) -> Iterator[None]:
    """Append the message of an error to `messages` instead of raising it."""
    try:
        yield
    except errors as error:
        messages.append(str(error))


def _attempt(way: Callable[[], Iterator[Resource]], blind: list[str]) -> list[Resource]:
    """Return the resources that were listed before the first error."""
    found: list[Resource] = []
    with collect_errors(blind, CloudError, CloudAuthError):
        found.extend(way())
    return found


def _of_kind(google: Google, kind: Kind, blind: list[str]) -> Iterator[Resource]:
    return (_aggregated if kind.aggregated else _global)(google, kind, blind)


def _aggregated(google: Google, kind: Kind, blind: list[str]) -> Iterator[Resource]:
    client = google.compute(kind.client)
    request = request_of(
        f"AggregatedList{kind.client}Request",
        project=google.project,
        max_results=PAGE,
        # Without this option, the whole list fails if one zone is down.
        return_partial_success=True,
    )
    what = f"listing {kind.gcloud}"
    for page in google.pages(what, client.aggregated_list, request):
        silent = {last_segment(place) for place in page.unreachables}
        _note_warning(page.warning, what, blind)
        for scope, listed in page.items.items():
            place = last_segment(scope)
            # A failed location has a warning in this field and is not always in `unreachables`.
            # gcloud also reads this field (googlecloudsdk/api_lib/compute/request_helper.py).
            if place not in silent:
                _note_warning(listed.warning, f"{what}: {place}", blind)
            for item in getattr(listed, snake(kind.client)):
                yield _resource(kind, item, location=place)
        blind += [f"{what}: {place} does not respond. Try again." for place in sorted(silent)]


def _global(google: Google, kind: Kind, blind: list[str]) -> Iterator[Resource]:
    client = google.compute(kind.client)
    request = request_of(f"List{kind.client}Request", project=google.project, max_results=PAGE)
    what = f"listing {kind.gcloud}"
    for page in google.pages(what, client.list, request):
        _note_warning(page.warning, what, blind)
        for item in page.items:
            yield _resource(kind, item, location="global")


def _note_warning(warning: Any, what: str, blind: list[str]) -> None:
    if warning.code not in _COMPLETE:
        message = joined_lines(warning.message).rstrip(".") or "no message"
        blind.append(f"{what}: {warning.code}: {message}. Try again.")


def _resource(kind: Kind, item: Any, *, location: str) -> Resource:
    labels = (
        printable_labels(item.labels) if kind.labelled else labels_in_description(item.description)
    )
    network = last_segment(_network(item)) or None
    return Resource(
        kind=kind.name,
        name=checked_name(item.name, kind.name),
        location=checked_name(location, f"{kind.name} {item.name}: location"),
        labels=labels,
        created_unix=parse_time(item.creation_timestamp),
        network=None if kind.name == "network" else network,
        status=str(item.status) or None if kind.name in ("instance", "disk") else None,
        ends_unix=_end_of(item) if kind.name == "instance" else None,
    )


def _end_of(machine: Any) -> float | None:
    """Return when Google will end a machine; None if it has no limit or is stopped.

    The client library lacks Google's terminationTimestamp: the time of the last start plus the
    limit. https://cloud.google.com/compute/docs/instances/limit-vm-runtime
    """
    started = parse_time(machine.last_start_timestamp or machine.creation_timestamp)
    limit_s = machine.scheduling.max_run_duration.seconds
    if machine.status not in RUNNING or started is None or not limit_s:
        return None
    return started + float(limit_s)


def _network(item: Any) -> str:
    interfaces = getattr(item, "network_interfaces", None)
    if interfaces:
        return str(interfaces[0].network)
    return str(getattr(item, "network", "") or "")


_OTHERS = (buckets, service_accounts, dns_zones, filestores)


def snake(name: str) -> str:
    """Convert a name such as ForwardingRules to snake case: `forwarding_rules`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
