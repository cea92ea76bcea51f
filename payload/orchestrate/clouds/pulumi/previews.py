"""Effects that a preview predicts for machines: deletions with the reasons, and metadata
changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from payload.core.printable_text import printable
from payload.orchestrate.clouds.gcp.removal_order import last_segment
from payload.orchestrate.clouds.pulumi.cli_errors import NEWER, PulumiError
from payload.orchestrate.clouds.pulumi.events import Update, name_of, type_of
from payload.orchestrate.clouds.pulumi.resource_types import INSTANCE
from payload.orchestrate.clouds.pulumi.stack_state import machine_names

# Operations that delete an existing resource, including replacement.
_DELETING = ("delete", "replace", "delete-replaced")


def machines_that_go(preview: Update) -> list[str]:
    """Return the machines that `pulumi up` would remove or replace.

    Raises PulumiError for an unreadable event, because it can be a machine's deletion.
    """
    if preview.unreadable:
        raise PulumiError(f"`pulumi preview`: {preview.unreadable} {NEWER}", "other")
    return machine_names(step.urn for step in preview.steps if step.op in _DELETING)


def changes_metadata(preview: Update) -> bool:
    """Return whether existing machines get new metadata. A machine reads metadata only at boot."""
    return any(
        step.op == "update" and type_of(step.urn) == INSTANCE and "metadata" in (step.diffs or ())
        for step in preview.steps
    )


_NETWORK, _BOOT = "its network", "its user-data"
# Inputs of an instance, each with the setting that changes it. If the trigger replaces a machine,
# the engine reports no differences, so the old and new states are compared.
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
    """Yield a line for each machine of `going`: whether it is removed, or why it is replaced."""
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
        yield f"{name}: replaced, because of changes to {why}" if why else f"{name}: removed"


def _at(inputs: Any, path: str) -> Any:
    """Return the value at a path; a URL, as stored by a refresh, is reduced to a name."""
    for key in path.split("."):
        if isinstance(inputs, list):
            inputs = inputs[int(key)] if len(inputs) > int(key) else None
        else:
            inputs = inputs.get(key) if isinstance(inputs, Mapping) else None
    return _URL.sub("", inputs) if isinstance(inputs, str) else inputs


def _change(setting: str, old: Any, new: Any) -> str:
    # Values are omitted, because the network can still be unknown and user-data is long.
    if setting in (_NETWORK, _BOOT):
        return setting
    return f"{setting} ({_shown(old)} to {_shown(new)})"


def _shown(value: Any) -> str:
    return "none" if value is None else printable(last_segment(str(value)))


_CREATING = ("create", "create-replacement", "replace")


def creates_anything(preview: Update) -> bool:
    """Return whether `pulumi up` would create any resource in Google Cloud."""
    made = (step.urn for step in preview.steps if step.op in _CREATING)
    return any(type_of(urn).startswith("gcp:") for urn in made)
