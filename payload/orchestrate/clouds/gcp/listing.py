"""Lists what is in a project: Compute Engine's kinds, and all the others."""

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
    last_word,
    marks,
    parse_time,
    printable_labels,
)
from payload.orchestrate.clouds.gcp.resource_kinds import KINDS, RUNNING, Kind
from payload.orchestrate.clouds.gcp.service_accounts import service_accounts

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
    with noted(blind, UnreadableError):
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


@contextmanager
def noted(said: list[str], *errors: type[TileforgeError]) -> Iterator[None]:
    """Put the message of an error into `said` and go on."""
    try:
        yield
    except errors as error:
        said.append(str(error))


def _attempt(way: Callable[[], Iterator[Resource]], blind: list[str]) -> list[Resource]:
    """Return what was found before an error, too."""
    found: list[Resource] = []
    with noted(blind, CloudError, CloudAuthError):
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
            for item in getattr(listed, snake(kind.client)):
                yield _resource(kind, item, location=place)
        blind += [f"{what}: {place} does not answer. Try again." for place in sorted(silent)]


def _global(google: Google, kind: Kind, blind: list[str]) -> Iterator[Resource]:
    client = google.compute(kind.client)
    request = request_of(f"List{kind.client}Request", project=google.project, max_results=PAGE)
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
        name=checked_name(item.name, kind.name),
        location=checked_name(location, f"{kind.name} {item.name}: place"),
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


def _network(item: Any) -> str:
    interfaces = getattr(item, "network_interfaces", None)
    if interfaces:
        return str(interfaces[0].network)
    return str(getattr(item, "network", "") or "")


_OTHERS = (buckets, service_accounts, dns_zones, filestores)


def snake(name: str) -> str:
    """Return `forwarding_rules` of ForwardingRules."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
