"""Resources of a project: their order of removal, and the command that removes each. Pure."""

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
    """One thing in the project."""

    kind: str
    """A Kind's name, FILESTORE, SERVICE_ACCOUNT, DNS_ZONE or BUCKET."""
    name: str
    """A service account's is its e-mail address."""
    location: str
    """Zone, region, or `global`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Or, of a kind that cannot have any, what its description says in their place."""
    created_unix: float | None = None
    network: str | None = None
    """Name of the network that it is in, where it is in one."""
    status: str | None = None
    ends_unix: float | None = None
    """Time at which Google ends the machine, while it runs and has a limit."""
    gib: int | None = None
    """Size of a Filestore instance, which is what it costs by."""

    def key(self) -> tuple[str, str, str]:
        """Return the key that identifies it."""
        return (self.kind, self.location, self.name)

    def expires_unix(self) -> float | None:
        """Return when its cluster was meant to be gone, if its label says so."""
        text = self.labels.get(EXPIRES_LABEL, "")
        return float(text) if re.fullmatch("[0-9]{1,12}", text) else None

    def removal(self, *, project: str) -> str:
        """Return the command that removes it."""
        if self.kind == BUCKET:
            return shlex.join(["gcloud", "storage", "rm", "--recursive", f"gs://{self.name}"])
        if self.kind == SERVICE_ACCOUNT:
            words = ["gcloud", "iam", "service-accounts", "delete", self.name]
            return shlex.join([*words, f"--project={project}", "--quiet"])
        if self.kind == DNS_ZONE:
            return self._zone_removal(project)
        if self.kind == FILESTORE:
            words = ["gcloud", "filestore", "instances", "delete", self.name]
            return shlex.join([*words, self._where(), f"--project={project}", "--quiet"])
        kind = KIND_OF[self.kind]
        words = ["gcloud", "compute", *kind.gcloud.split(), "delete", self.name]
        if kind.aggregated:
            words.append(self._where())
        return shlex.join([*words, f"--project={project}", "--quiet"])

    def _zone_removal(self, project: str) -> str:
        # A zone with records cannot be removed; infra/gcp/network.py puts these two there.
        records = (("restricted.googleapis.com.", "A"), ("*.googleapis.com.", "CNAME"))
        where = [f"--project={project}", "--quiet"]
        delete = ["gcloud", "dns", "record-sets", "delete"]
        commands = [
            [*delete, name, f"--type={kind}", f"--zone={self.name}", *where]
            for name, kind in records
        ]
        commands.append(["gcloud", "dns", "managed-zones", "delete", self.name, *where])
        return "; ".join(map(shlex.join, commands))

    def _where(self) -> str:
        if self.location == "global":
            return "--global"
        return f"--{'zone' if is_zone(self.location) else 'region'}={self.location}"


def is_zone(location: str) -> bool:
    """Return whether it is a zone; that is a region with a letter: us-central1-a."""
    return location.count("-") == 2


def in_order(resources: Iterable[Resource]) -> list[Resource]:
    """Return resources in the order of their removal: a network goes after what is in it."""
    return sorted(resources, key=lambda each: (_ORDER[each.kind], each.location, each.name))


def marks(description: str) -> dict[str, str]:
    """Return the labels that the description of something without labels stands in for."""
    return dict(_MARK.findall(description))


def printable_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels as a table may show them."""
    return {printable_line(str(key)): printable_line(str(value)) for key, value in labels.items()}


def last_word(url: str | None) -> str:
    """Return `us-central1-a` of a URL that ends with it."""
    return (url or "").rpartition("/")[2]


def parse_time(text: str | None) -> float | None:
    """Return the Unix time of an RFC 3339 text, or None."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except (OverflowError, ValueError):
        return None


PAGE = 500


def checked_name(name: str, what: str) -> str:
    """Return a name that Google can have given; it becomes a word of requests and commands."""
    if not CLOUD_NAME.fullmatch(name):
        raise CloudError(
            f"listing: {joined_lines(what)}: Google Cloud names one {shown(name)}, which is no "
            "name."
        )
    return name
