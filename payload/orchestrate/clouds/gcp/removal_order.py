"""Resources of a project: the order of removal, and the command that removes each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from payload.core.errors import CloudError
from payload.core.one_line import joined_lines, printable_line
from payload.core.printable_text import shown
from payload.orchestrate.clouds.gcp.resource_kinds import (
    BUCKET,
    DNS_ZONE,
    FILESTORE,
    KIND_OF,
    SERVICE_ACCOUNT,
)
from payload.stack.cluster_identity import IDENTITY_LABEL
from payload.stack.google_name_patterns import CLOUD_NAME
from payload.stack.resource_labels import CLUSTER_LABEL, EXPIRES_LABEL

_MARK = re.compile(rf"(?<!\S)({CLUSTER_LABEL}|{IDENTITY_LABEL}|{EXPIRES_LABEL})=([a-z0-9-]+)(?!\S)")
_ORDER = {
    name: place
    for place, name in enumerate([DNS_ZONE, FILESTORE, *KIND_OF, SERVICE_ACCOUNT, BUCKET])
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource of the project."""

    kind: str
    """The name of a Kind, or FILESTORE, SERVICE_ACCOUNT, DNS_ZONE or BUCKET."""
    name: str
    """The resource's name; for a service account, its e-mail address."""
    location: str
    """Zone, region, or `global`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The resource's labels. For a kind without labels, the labels are read from the
    description."""
    created_unix: float | None = None
    network: str | None = None
    """Name of the resource's network, or None."""
    status: str | None = None
    ends_unix: float | None = None
    """When Google will end the machine; None if it does not run, or has no time limit."""
    gib: int | None = None
    """Size of a Filestore instance, which determines its price."""

    def key(self) -> tuple[str, str, str]:
        """Return kind, location and name, which identify the resource."""
        return (self.kind, self.location, self.name)

    def expires_unix(self) -> float | None:
        """Return the expiry time in the resource's label, or None."""
        text = self.labels.get(EXPIRES_LABEL, "")
        return float(text) if re.fullmatch("[0-9]{1,12}", text) else None

    def removal(self, *, project: str) -> str:
        """Return the command that removes the resource."""
        if self.kind == BUCKET:
            return shlex.join(["gcloud", "storage", "rm", "--recursive", f"gs://{self.name}"])
        if self.kind == SERVICE_ACCOUNT:
            argv = ["gcloud", "iam", "service-accounts", "delete", self.name]
            return shlex.join([*argv, f"--project={project}", "--quiet"])
        if self.kind == DNS_ZONE:
            return self._zone_removal(project)
        if self.kind == FILESTORE:
            argv = ["gcloud", "filestore", "instances", "delete", self.name]
            return shlex.join([*argv, self._location_option(), f"--project={project}", "--quiet"])
        kind = KIND_OF[self.kind]
        argv = ["gcloud", "compute", *kind.gcloud.split(), "delete", self.name]
        if kind.aggregated:
            argv.append(self._location_option())
        return shlex.join([*argv, f"--project={project}", "--quiet"])

    def _zone_removal(self, project: str) -> str:
        # A zone with records cannot be removed. infra/gcp/network.py creates these two records.
        records = (("restricted.googleapis.com.", "A"), ("*.googleapis.com.", "CNAME"))
        options = [f"--project={project}", "--quiet"]
        delete = ["gcloud", "dns", "record-sets", "delete"]
        commands = [
            [*delete, name, f"--type={kind}", f"--zone={self.name}", *options]
            for name, kind in records
        ]
        commands.append(["gcloud", "dns", "managed-zones", "delete", self.name, *options])
        return "; ".join(map(shlex.join, commands))

    def _location_option(self) -> str:
        if self.location == "global":
            return "--global"
        return f"--{'zone' if is_zone(self.location) else 'region'}={self.location}"


def is_zone(location: str) -> bool:
    """Return whether the location is a zone.

    A zone's name is a region and a letter: us-central1-a.
    """
    return location.count("-") == 2


def in_order(resources: Iterable[Resource]) -> list[Resource]:
    """Return the resources in the order of removal, for example networks after their contents."""
    return sorted(resources, key=lambda each: (_ORDER[each.kind], each.location, each.name))


def labels_in_description(description: str) -> dict[str, str]:
    """Return the labels in a description, for a resource that cannot have labels."""
    return dict(_MARK.findall(description))


def printable_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels that are safe to print in a table."""
    return {printable_line(str(key)): printable_line(str(value)) for key, value in labels.items()}


def last_segment(url: str | None) -> str:
    """Return the last path segment of a URL, such as `us-central1-a`."""
    return (url or "").rpartition("/")[2]


def parse_time(text: str | None) -> float | None:
    """Return the Unix time of an RFC 3339 timestamp, or None if it is invalid."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except (OverflowError, ValueError):
        return None


PAGE = 500


def checked_name(name: str, what: str) -> str:
    """Return the name if it is valid, because requests and commands contain it.

    Raises CloudError.
    """
    if not CLOUD_NAME.fullmatch(name):
        raise CloudError(
            f"listing: {joined_lines(what)}: Google Cloud returned the invalid name {shown(name)}. "
            "Try again."
        )
    return name
