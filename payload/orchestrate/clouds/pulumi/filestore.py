"""Filestore instances of a stack: their location and cost, and instances that a preview deletes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from payload.core.errors import CloudAuthError, CloudError, ConfigError, TileforgeError
from payload.core.printable_text import printable
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.filestore_instances import filestores
from payload.orchestrate.clouds.gcp.ownership import Ownership
from payload.orchestrate.clouds.gcp.removal_order import last_segment
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import Step, Update, name_of, type_of
from payload.orchestrate.clouds.pulumi.resource_types import FILESTORE
from payload.orchestrate.clouds.pulumi.stack_state import StackState, inputs_in_state
from payload.pricing.cloud_prices import filestore_price

_ENDS = ("delete", "replace", "delete-replaced")


def has_filestore(state: StackState) -> bool:
    """Return whether the stack has a Filestore instance. Such an instance can hold data."""
    return bool(_in_state(state))


def own_filestores(google: Google, state: StackState, own: Ownership) -> list[str]:
    """Return the names of the cluster's instances, from the stack's state and Google's list.

    If Google's list cannot be read, only the state is used.
    """
    names = _in_state(state)
    with suppress(CloudError, CloudAuthError):
        names += [each.name for each in filestores(google) if own.owns(each)]
    return sorted(set(names))


def _in_state(state: StackState) -> list[str]:
    found = [(urn, known) for urn, known in state.parts if type_of(urn) == FILESTORE]
    return [last_segment(known) if known else name_of(urn) for urn, known in found]


def filestores_that_go(preview: Update) -> list[str]:
    """Return the instances that `pulumi up` would delete or replace, together with their data."""
    return sorted({name_of(step.urn) for step in _steps(preview) if step.op in _ENDS})


def refuse_another_region(preview: Update, region: str) -> None:
    """Raise ConfigError if the instance is not in the configured region."""
    for step in _steps(preview):
        place = _place(step)
        if step.op not in _ENDS and place and not place.startswith(f"{region}-"):
            raise ConfigError(
                f"region = {region!r}, but Filestore {name_of(step.urn)} is in {place} with all "
                "data. Copy the data if you need it, remove the instance (pulumi config set "
                "sharedStorage none, then `up`), and set sharedStorage again"
            )


def zone_note(update: Update, zone: str | None) -> str:
    """Return a note if the machines are not in the instance's zone; otherwise an empty string."""
    for step in _steps(update):
        place = _place(step)
        if step.op not in _ENDS and place and zone and place != zone:
            return (
                f"Filestore {name_of(step.urn)} is in {place}, but the machines are in {zone}: "
                "Google bills traffic between zones"
            )
    return ""


def filestore_cost_note(pulumi: Pulumi) -> str:
    """Return a note on the cost of the stack's instance, which is billed until it is removed.

    Return an empty string if there is no instance, or if the state cannot be read.
    """
    try:
        found = inputs_in_state(pulumi, FILESTORE)
    except TileforgeError:
        return ""
    return "".join(_billed(inputs) for inputs in found)


def _billed(inputs: Any) -> str:
    place = printable(str(inputs.get("location")))
    shares = inputs.get("fileShares") or {}
    gib = shares.get("capacityGb") if isinstance(shares, dict) else None
    usd = None
    if isinstance(gib, (int, float)):
        usd = filestore_price(gib=int(gib), region=place.rpartition("-")[0])
    price = f"billed at ${usd:.2f}/h" if usd is not None else "billed"
    return (
        f"Filestore {printable(str(inputs.get('name')))} in {place} has no lifetime limit and is "
        f"{price} until it is removed. "
    )


def _steps(update: Update) -> list[Step]:
    return [
        step for step in update.steps if type_of(step.urn) == FILESTORE and step.op != "refresh"
    ]


def _place(step: Step) -> str:
    inputs = step.new.inputs if step.new is not None else None
    return printable(str((inputs or {}).get("location") or ""))
