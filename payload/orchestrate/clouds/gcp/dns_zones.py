"""Lists DNS zones of a project, and removes them with their records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import quote

from payload.core.errors import CloudAuthError
from payload.core.validation.fields import checked
from payload.orchestrate.clouds.gcp.client import (
    CloudMissingError,
    Google,
)
from payload.orchestrate.clouds.gcp.removal_order import Resource, parse_time, printable_labels
from payload.orchestrate.clouds.gcp.resource_kinds import DNS_ZONE
from payload.stack.google_name_patterns import CLOUD_NAME

# Record types that every zone has; Google deletes them with the zone.
_OWN_RECORDS = ("NS", "SOA")


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


def dns_zones(google: Google) -> Iterator[Resource]:
    """Yield the project's DNS zones; yield nothing if the API is disabled, which is the usual
    case."""
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
    """Remove a DNS zone and its records; return when the zone is gone.

    Raises the errors of Google.call.
    """
    what = f"removing {DNS_ZONE} {name}"
    zone = f"/dns/v1/projects/{google.project}/managedZones/{quote(name)}"
    pages = google.get_pages("dns", f"{zone}/rrsets?maxResults=100", what=what, shape=_RecordPage)
    for record in [each for page in pages for each in page.rrsets]:
        if record.type not in _OWN_RECORDS:
            with suppress(CloudMissingError):
                record_path = f"{quote(record.name, safe='')}/{quote(record.type, safe='')}"
                google.delete("dns", f"{zone}/rrsets/{record_path}", what=what)
    google.delete("dns", zone, what=what)
