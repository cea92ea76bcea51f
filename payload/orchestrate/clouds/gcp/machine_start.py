"""Starts stopped machines, after confirmation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

from rich.console import Console

from payload.core.errors import CapacityError, CloudAuthError, CloudError, ConfigError
from payload.core.suggested_commands import command
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.clouds.gcp.client import REQUEST_S, Google, request_of
from payload.orchestrate.clouds.gcp.compute_operations import wait_for_operation
from payload.orchestrate.clouds.gcp.compute_resource import compute_instance
from payload.orchestrate.clouds.gcp.expiry_labels import renew_expiry_label
from payload.orchestrate.clouds.gcp.head_address import external_address
from payload.orchestrate.clouds.gcp.ownership import Ownership
from payload.orchestrate.clouds.gcp.resource_kinds import STOPPED
from payload.orchestrate.clouds.gcp.stock_outs import find_stock_out
from payload.orchestrate.clouds.gcp.stopped_machines import StoppedMachine, stopped_machines
from payload.orchestrate.terminal.console import confirm

_UP = command("orchestrate", "up")
_DOWN = command("orchestrate", "down")

StoppedChoice = Literal["start", "replace", "leave"]
STOPPED_CHOICES: tuple[StoppedChoice, ...] = ("start", "replace", "leave")
_START_S = 300.0


def handle_stopped_machines(
    google: Google,
    places: Mapping[tuple[str, str], str],
    *,
    choice: StoppedChoice | None,
    dry_run: bool,
    assume_yes: bool,
    talk: Console,
) -> list[str]:
    """Report the stack's stopped machines and start them after confirmation.

    `places` is the result of `places_in`. If `assume_yes` is set without a choice, only machines
    that Google stopped are started. A person may have stopped the other machines on purpose. Return
    the URNs of machines to replace. Raises CapacityError and CloudError if a start fails.
    """
    try:
        found = stopped_machines(google, places)
    except (CloudError, CloudAuthError) as error:
        talk.print(f"warning: cannot check for stopped machines: {error}")
        return []
    for each in found:
        talk.print(f"machine {each}: its disk is kept and billed, {NO_END}")
    idle = [each for each in found if each.status in STOPPED]
    for each in (each for each in found if each not in idle):
        talk.print(f"{each.name}: still stopping. Wait until it is stopped, then repeat: {_UP}")
    if not idle or dry_run:
        return []
    names = ", ".join(each.name for each in idle)
    if choice is None and assume_yes:
        return _start_what_google_stopped(google, idle, talk=talk)
    if choice is None:
        if confirm(f"Start {names}? Running machines are billed.", assume_yes=False):
            choice = "start"
        elif confirm(f"Replace {names} and delete the data on the disk?", assume_yes=False):
            choice = "replace"
    if choice == "start":
        start(google, idle, talk=talk)
    elif choice == "replace":
        return [places[each.name, each.zone] for each in idle]
    else:
        talk.print(f"{names}: left stopped")
    return []


NO_END = "and its lifetime limit is paused until the machine is started"


def _start_what_google_stopped(
    google: Google, idle: Sequence[StoppedMachine], *, talk: Console
) -> list[str]:
    start(google, [each for each in idle if each.by_google], talk=talk)
    for each in idle:
        if not each.by_google:
            talk.print(
                f"warning: {each.name} stays stopped, because a person may have stopped it on "
                f"purpose. Start it: {_UP} --stopped start; or replace it: {_UP} --stopped replace"
            )
    return []


def start(google: Google, machines: Sequence[StoppedMachine], *, talk: Console) -> None:
    """Start the machines with their disks and wait until all run.

    Raises CloudError, and CapacityError if the zone has no capacity for a machine.
    """
    client = google.compute("Instances")
    begun = []
    for each in machines:
        verb = "Resume" if each.status == "SUSPENDED" else "Start"
        place = {"project": google.project, "zone": each.zone}
        request = request_of(f"{verb}InstanceRequest", **place, instance=each.name)
        method = client.resume_unary if verb == "Resume" else client.start_unary
        what = f"starting {each.name}"
        with _explained(each):
            operation = google.call(
                what, partial(method, request=request, retry=None, timeout=REQUEST_S)
            )
        begun.append((each, operation, what, place))
    ends = time.monotonic() + _START_S
    for each, operation, what, place in begun:
        with _explained(each):
            wait_for_operation(google, operation, what, operations="Zone", place=place, ends=ends)
        talk.print(f"{each.name}: started and billed; its lifetime starts from zero")
        renew_expiry_label(google, name=each.name, zone=each.zone, talk=talk)


@contextmanager
def _explained(machine: StoppedMachine) -> Iterator[None]:
    """Add to the error of a failed start that the disk is kept, and the next command."""
    kept = (
        "Its disk is kept and billed. Try again later; or discard the disk: "
        f"{_UP} --stopped replace, or {_DOWN} --without-collect"
    )
    try:
        yield
    except CloudError as error:
        stock_out = find_stock_out(str(error))
        if stock_out is None:
            raise CloudError(f"{error} {kept}") from None
        what = stock_out.machine_type or "machine of its type"
        raise CapacityError(
            f"{machine.name} cannot be started: no {what} is free in {machine.zone}. {kept}"
        ) from None


def start_head(
    google: Google,
    inventory: ClusterInventory,
    own: Ownership,
    *,
    dry_run: bool,
    assume_yes: bool,
    talk: Console,
) -> ClusterInventory | None:
    """Report stopped machines; start the head, which has the results, after confirmation.

    Return the inventory with the head's new external address, or None if the head was not started.
    Raises ConfigError if the user declines, and the errors of `start`.
    """
    try:
        places = {(node.name, node.zone or "") for node in inventory.nodes}
        found = stopped_machines(google, places, own=own)
    except (CloudError, CloudAuthError) as error:
        talk.print(f"warning: cannot check for stopped machines: {error}")
        return None
    for each in found:
        talk.print(f"machine {each}")
    head = next((each for each in found if each.name == inventory.head.name), None)
    if head is None or head.status not in STOPPED:
        return None
    if dry_run:
        talk.print(f"{head.name} would be started first, to collect results from its disk")
        return None
    if not confirm(f"Start {head.name} to collect results from its disk?", assume_yes=assume_yes):
        raise ConfigError(
            f"{head.name} is {head.status} and can have results on its disk, so nothing was "
            f"destroyed. To destroy the results, too: {_DOWN} --without-collect"
        )
    start(google, [head], talk=talk)
    node = inventory.head
    if node.external_address is not None:
        node = replace(node, external_address=external_address(compute_instance(google, node)))
    return replace(inventory, nodes=(node, *inventory.nodes[1:]))
