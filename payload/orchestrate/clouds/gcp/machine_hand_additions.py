"""Disks, labels, metadata and tags that people added to machines by hand."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from payload.core.errors import ConfigError
from payload.core.printable_text import printable
from payload.orchestrate.clouds.gcp.client import Google, request_of
from payload.orchestrate.clouds.gcp.removal_order import last_segment
from payload.stack.resource_labels import CLUSTER_LABEL

KEPT_VARIABLE = "TILEFORGE_METADATA_KEPT"
"""Environment variable that passes the keys of hand-added metadata, comma-separated, to the cluster
program. Pulumi manages a machine's metadata as a whole, so it would remove these keys without this
variable."""
OWN_METADATA = frozenset(
    {
        *("block-project-ssh-keys", "enable-guest-attributes", "enable-oslogin"),
        *("serial-port-enable", "shared-source", "user-data"),
    }
)
"""Keys of metadata that the cluster program sets."""
_OWN_LABELS = re.compile(r"(tileforge|goog)-.*|managed-by")
_PAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """Additions to one machine that people made by hand."""

    machine: str
    zone: str
    disks: Mapping[str, bool]
    """Disks by name; True for a disk that Google deletes with the machine."""
    labels: tuple[str, ...]
    metadata: tuple[str, ...]
    tags: tuple[str, ...]

    def describe(self) -> str:
        """Return text such as `disk data, label team, tag web`; empty if there are no additions."""
        named = {
            "disk": self.disks,
            "label": self.labels,
            "metadata": self.metadata,
            "tag": self.tags,
        }
        return ", ".join(f"{what} {each}" for what, names in named.items() for each in names)


def hand_added(
    google: Google, cluster: str, *, machines: Collection[str], labels: Collection[str]
) -> list[Additions]:
    """Return the cluster's machines that have additions.

    `labels` are the keys of the config's labels, which are not additions. Raises CloudError and
    CloudAuthError.
    """
    client = google.compute("Instances")
    request = request_of(
        "AggregatedListInstancesRequest",
        project=google.project,
        max_results=_PAGE,
        return_partial_success=True,
    )
    found = [
        _additions(item, zone=last_segment(scope), labels=labels)
        for page in google.pages("listing instances", client.aggregated_list, request)
        for scope, listed in page.items.items()
        for item in listed.instances
        if item.name in machines and item.labels.get(CLUSTER_LABEL) == cluster
    ]
    return sorted((each for each in found if each.describe()), key=lambda each: each.machine)


def _additions(item: Any, *, zone: str, labels: Collection[str]) -> Additions:
    metadata = [printable(each.key) for each in item.metadata.items]
    own_labels = [key for key in item.labels if _OWN_LABELS.fullmatch(key) or key in labels]
    return Additions(
        machine=printable(item.name),
        zone=zone,
        disks={
            printable(last_segment(disk.source) or disk.device_name): bool(disk.auto_delete)
            for disk in item.disks
            if not disk.boot and disk.type_ != "SCRATCH"
        },
        labels=tuple(sorted(printable(key) for key in item.labels if key not in own_labels)),
        metadata=tuple(sorted(key for key in metadata if key not in OWN_METADATA)),
        tags=tuple(sorted(printable(tag) for tag in item.tags.items)),
    )


def kept_metadata(added: Sequence[Additions]) -> str:
    """Return the value of KEPT_VARIABLE."""
    return ",".join(sorted({key for each in added for key in each.metadata}))


def added_lines(added: Sequence[Additions], going: Collection[str]) -> Iterator[str]:
    """Yield a line for each machine with additions. The line states whether the additions are kept.

    `going` are the machines to replace. Raises ConfigError for a disk that Google would delete with
    its machine.
    """
    for each in added:
        if each.machine not in going:
            yield f"{each.machine}: added by hand, kept: {each.describe()}"
            continue
        yield (
            f"{each.machine}: added by hand, lost because the machine is replaced: "
            f"{each.describe()}" + ("; disks are detached and kept" if each.disks else "")
        )
        doomed = next((disk for disk, goes_too in each.disks.items() if goes_too), None)
        if doomed is not None:
            raise ConfigError(
                f"{each.machine}: replacing the machine would delete disk {doomed}, which was "
                "attached by hand. Nothing was built. Keep the disk: gcloud compute instances "
                f"set-disk-auto-delete {each.machine} --zone={each.zone} --disk={doomed} "
                "--no-auto-delete"
            )
