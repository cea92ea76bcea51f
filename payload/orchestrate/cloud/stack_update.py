"""`up` on a cluster that is up or was: machines that end and why, and all that has to stay."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.core.errors import CloudError, ConfigError
from payload.core.printable_text import printable
from payload.core.suggested_commands import command
from payload.orchestrate.cloud.firewall_drift import INSTANCE, StackState
from payload.orchestrate.cloud.google import Google, request_of
from payload.orchestrate.cloud.listing import bucket_in, remove
from payload.orchestrate.cloud.machine_status import places_in
from payload.orchestrate.cloud.pulumi import Pulumi, Update, name_of, type_of
from payload.orchestrate.cloud.resources import Resource, last_word
from payload.orchestrate.cloud.stack_outputs import recall
from payload.stack.cluster_identity import identity_in
from payload.stack.resource_labels import CLUSTER_LABEL, KEPT_LABEL

_NETWORK, _BOOT = "its network", "what it boots with"
# The inputs of an instance, and the setting that decides each. The engine names no difference of a
# machine that is replaced by its trigger, so the two states are compared.
_SETTINGS = {
    "machineType": "machineType",
    "zone": "zones",
    "bootDisk.initializeParams.image": "image",
    "bootDisk.initializeParams.type": "diskType",
    "bootDisk.initializeParams.size": "diskGb or headDiskGb",
    "bootDisk.kmsKeySelfLink": "kmsKey",
    "scheduling.provisioningModel": "spot",
    "scheduling.maxRunDuration.seconds": "maxLifetime",
    "scheduling.onHostMaintenance": "compactPlacement",
    "advancedMachineFeatures.threadsPerCore": "threadsPerCore",
    "networkPerformanceConfig.totalEgressBandwidthTier": "tier1",
    "confidentialInstanceConfig.confidentialInstanceType": "confidential",
    "networkInterfaces.0.subnetwork": _NETWORK,
    "metadata.user-data": _BOOT,
}
_URL = re.compile(r"^https://[^/]+/compute/[^/]+/")


def reasons(preview: Update, going: Sequence[str]) -> Iterator[str]:
    """Yield a line for each machine of `going`: removed, or replaced and why."""
    for name in going:
        why = ""
        for step in preview.steps:
            if type_of(step.urn) == INSTANCE and name_of(step.urn) == name and step.op == "replace":
                old = (step.old and step.old.inputs) or {}
                new = (step.new and step.new.inputs) or {}
                found = [
                    _change(setting, _at(old, path), _at(new, path))
                    for path, setting in _SETTINGS.items()
                    if _at(old, path) != _at(new, path)
                ]
                why = ", ".join(found) or "the cluster program"
        yield f"{name}: replaced, as this changes: {why}" if why else f"{name}: removed"


def _at(inputs: Any, path: str) -> Any:
    """Return the value at a path; of a URL, which a refresh makes of a name, the name."""
    for key in path.split("."):
        if isinstance(inputs, list):
            inputs = inputs[int(key)] if len(inputs) > int(key) else None
        else:
            inputs = inputs.get(key) if isinstance(inputs, Mapping) else None
    return _URL.sub("", inputs) if isinstance(inputs, str) else inputs


def _change(setting: str, old: Any, new: Any) -> str:
    # Neither is a value of the config: one may be not known yet, the other is long.
    if setting in (_NETWORK, _BOOT):
        return setting
    return f"{setting} ({_shown(old)} to {_shown(new)})"


def _shown(value: Any) -> str:
    return "none" if value is None else printable(last_word(str(value)))


KEPT_VARIABLE = "TILEFORGE_METADATA_KEPT"
"""Tells the cluster program, between commas, the keys of metadata that people have added. Pulumi
takes the machines' metadata for its own as a whole, and would remove them."""
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
    """Additions that people have made to one machine by hand."""

    machine: str
    zone: str
    disks: Mapping[str, bool]
    """True for a disk that Google deletes with the machine."""
    labels: tuple[str, ...]
    metadata: tuple[str, ...]
    tags: tuple[str, ...]

    def describe(self) -> str:
        """Return `disk data, label team, metadata startup-script, tag web`; empty for nothing."""
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
    """Return the additions to those of the cluster's machines that have any.

    `labels` are the keys that the config adds. Raises CloudError and CloudAuthError.
    """
    client = google.compute("Instances")
    request = request_of(
        "AggregatedListInstancesRequest",
        project=google.project,
        max_results=_PAGE,
        return_partial_success=True,
    )
    found = [
        _additions(item, zone=last_word(scope), labels=labels)
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
            printable(last_word(disk.source) or disk.device_name): bool(disk.auto_delete)
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
    """Yield a line for each machine with additions: left alone, or lost with it.

    Raises ConfigError for a disk that would be deleted with its machine.
    """
    for each in added:
        if each.machine not in going:
            yield f"{each.machine}: added by hand and left alone: {each.describe()}"
            continue
        yield (
            f"{each.machine}: added by hand, and not on the machine that takes its place: "
            f"{each.describe()}" + ("; disks are detached and stay" if each.disks else "")
        )
        doomed = next((disk for disk, goes_too in each.disks.items() if goes_too), None)
        if doomed is not None:
            raise ConfigError(
                f"{each.machine}: disk {doomed} was attached by hand, and Google deletes it with "
                "the machine, so nothing was built. Keep it: gcloud compute instances "
                f"set-disk-auto-delete {each.machine} --zone={each.zone} --disk={doomed} "
                "--no-auto-delete"
            )


def remove_machines(google: Google, state: StackState) -> None:
    """Remove the stack's machines, and leave all else. Raises CloudError when one stays."""
    failed = remove(
        google,
        [
            Resource(kind="instance", name=name, location=zone)
            for name, zone in places_in(state, project=google.project)
        ],
    )
    if failed:
        raise CloudError("; ".join(failed))


def refuse_another_project(state: StackState, project: str) -> None:
    """Raise ConfigError where the stack has resources in another project than the config's.

    Pulumi would destroy and build all of it; and no name that the stack knows is proof here.
    """
    if others := [each for each in state.projects if each != project]:
        raise ConfigError(
            f"project = {project!r}: the stack has resources in project {', '.join(others)}, so "
            "nothing was built. Use another stack for this project: pulumi stack init NAME; or "
            f"destroy those first: {command('orchestrate', 'down')}"
        )


def use_kept_bucket(
    pulumi: Pulumi,
    known: Mapping[str, Any],
    cluster: str,
    state: StackState,
    google: Callable[[], Google],
    *,
    identity: str,
    folder: Path,
    dry_run: bool,
    talk: Console,
) -> None:
    """Put the bucket that this folder's cluster had before into the config, in place of `create`.

    Its runs resume by their id there. One that is gone becomes `create` again. Raises CloudError,
    CloudAuthError and PulumiError.
    """
    before, setting = recall(folder, cluster), known.get("bucket")
    if before is None or before.bucket is None or before.project != known.get("project"):
        return
    if state.bucket or setting not in ("create", before.bucket):
        return
    is_there = _is_kept(google(), before.bucket, cluster, identity, region=before.region)
    if is_there == (setting == before.bucket):
        return
    wanted, words = "create", f"gs://{before.bucket} is gone: a new results bucket is made"
    if is_there:
        wanted = before.bucket
        words = (
            f"bucket: create: gs://{wanted}, which this cluster had before, is used again; the "
            "stack's config names it now"
        )
    talk.print(f"without --dry-run: {words}" if dry_run else words)
    if not dry_run:
        pulumi.ask("config", "set", "bucket", wanted)


def _is_kept(google: Google, name: str, cluster: str, identity: str, *, region: str) -> bool:
    """Return whether the project has the bucket, and it is this cluster's.

    After its end anybody may make one of its name, in a project of theirs and with any labels.
    """
    found = bucket_in(google, name, what=f"looking for gs://{name}")
    if found is None or identity_in(found.labels) != identity:
        return False
    is_ours = found.labels.get(CLUSTER_LABEL) == cluster and KEPT_LABEL in found.labels
    return is_ours and found.location.lower() == region
