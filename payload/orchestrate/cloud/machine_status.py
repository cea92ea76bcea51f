"""The machines that a cluster has in Google Cloud, and those of them that were stopped.

Google ends a machine of a compact cluster at host maintenance and keeps its disk. Its lifetime does
not count while it is stopped, so that it is never deleted:
https://cloud.google.com/compute/docs/instances/limit-vm-runtime
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from rich.console import Console

from payload.core.errors import (
    CapacityError,
    CloudAuthError,
    CloudError,
    ConfigError,
    ExitCode,
    TileforgeError,
)
from payload.core.files import write_whole
from payload.core.one_line import joined_lines
from payload.core.suggested_commands import command
from payload.machines.inventory import Access, ClusterInventory, Node
from payload.orchestrate.cloud.failures import find_stock_out
from payload.orchestrate.cloud.firewall_drift import INSTANCE, StackState, stack_state
from payload.orchestrate.cloud.google import REQUEST_S, Endpoints, Google, request_of
from payload.orchestrate.cloud.listing import list_machines, see_to_its_end
from payload.orchestrate.cloud.ownership import Ownership
from payload.orchestrate.cloud.project_checks import Check, ask_compute, unknown
from payload.orchestrate.cloud.pulumi import Pulumi, PulumiError, type_of
from payload.orchestrate.cloud.resources import EXPIRES_LABEL
from payload.orchestrate.cloud.stack_outputs import ENDING, STOPPED, external_address
from payload.orchestrate.terminal.console import confirm
from payload.run_record.run_files import RunPaths

StoppedChoice = Literal["start", "replace", "leave"]
STOPPED_CHOICES: tuple[StoppedChoice, ...] = ("start", "replace", "leave")

# Types of operations that stop a machine, in words.
_BY_GOOGLE = {
    "compute.instances.terminateOnHostMaintenance": "Google's host maintenance stopped it",
    "compute.instances.hostError": "a failure of Google's host stopped it",
    "compute.instances.preempted": "Google preempted it",
}
_BY_OTHERS = {
    "compute.instances.guestTerminate": "it was shut down from within",
    "stop": "{user} stopped it",
    "suspend": "{user} suspended it",
}
_ID = re.compile(r"projects/([^/]+)/zones/(?P<zone>[^/]+)/instances/(?P<name>[^/]+)")
_LINKS = "https://www.googleapis.com/compute/v1/"
_START_S = 300.0
CLOCK_SLACK_S = 60.0
"""How far this machine's clock may be ahead of Google's."""
_UP = command("orchestrate", "up")
_DOWN = command("orchestrate", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedMachine:
    """A machine that exists and does not run."""

    name: str
    zone: str
    status: str
    """Google's word, such as TERMINATED."""
    reason: str = ""
    """Cause of the stop, in words; empty where Google does not say."""
    by_google: bool = False
    """True if Google is known to have stopped it; otherwise a person may have, on purpose."""

    def __str__(self) -> str:
        return f"{self.name} is {self.status}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesThere:
    """The machines of a cluster, by Google's list and the stack's state."""

    names: tuple[str, ...]
    older: tuple[str, ...]
    """Those that are in Google Cloud alone, and were there before the operation began."""


def machines_there(
    google: Google, own: Ownership, state: StackState, *, since_unix: float
) -> MachinesThere:
    """Return the machines that are the cluster's own or in the stack's state.

    The operation began at `since_unix`. Raises CloudError when not every zone could be listed, and
    CloudAuthError.
    """
    labelled = [each for each in list_machines(google) if own.owns(each)]
    return MachinesThere(
        names=tuple(dict.fromkeys([*state.machines, *(each.name for each in labelled)])),
        older=tuple(
            each.name
            for each in labelled
            if each.name not in state.machines
            and (each.created_unix or 0.0) < since_unix - CLOCK_SLACK_S
        ),
    )


def places_in(state: StackState, *, project: str) -> dict[tuple[str, str], str]:
    """Return the URN of each machine of the stack's state in a project, by its name and zone."""
    found = {}
    for urn, known in state.parts:
        place = _ID.fullmatch(known or "")
        if type_of(urn) == INSTANCE and place is not None and place[1] == project:
            found[place["name"], place["zone"]] = urn
    return found


def stopped_machines(
    google: Google, places: Collection[tuple[str, str]], *, own: Ownership | None = None
) -> list[StoppedMachine]:
    """Return those of these machines (name and zone) that are stopped, or about to be.

    With `own` only machines that it owns. Raises CloudError when not every zone could be listed,
    and CloudAuthError.
    """
    if not places:
        return []
    return [
        _with_reason(google, StoppedMachine(name=each.name, zone=each.location, status=each.status))
        for each in list_machines(google)
        if (each.name, each.location) in places
        and each.status in (*STOPPED, *ENDING)
        and (own is None or own.owns(each))
    ]


def _with_reason(google: Google, machine: StoppedMachine) -> StoppedMachine:
    """Return the machine with the reason of its newest stop, which Google keeps for 14 days."""
    place = f"projects/{google.project}/zones/{machine.zone}/instances/{machine.name}"
    request = request_of(
        "ListZoneOperationsRequest",
        project=google.project,
        zone=machine.zone,
        # The whole link: on parts of one the filter finds nothing, without an error.
        filter=f'targetLink="{_LINKS}{place}"',
        max_results=500,
    )
    client = google.compute("ZoneOperations")
    try:
        found = [
            each
            for page in google.pages(f"{machine.name}: why it stopped", client.list, request)
            for each in page.items
            if each.target_link.endswith(f"/{place}")
            and each.operation_type in _BY_GOOGLE.keys() | _BY_OTHERS.keys()
        ]
    except (CloudError, CloudAuthError):
        return machine
    if not found:
        return machine
    newest = max(found, key=lambda each: each.insert_time)
    words = _BY_GOOGLE.get(newest.operation_type)
    other = _BY_OTHERS.get(newest.operation_type, "").format(user=newest.user or "somebody")
    when = joined_lines(newest.insert_time)
    return replace(
        machine,
        reason=joined_lines(f"{words or other}, {when}" if when else words or other),
        by_google=words is not None,
    )


def see_to_stopped(
    google: Google,
    places: Mapping[tuple[str, str], str],
    *,
    choice: StoppedChoice | None,
    dry_run: bool,
    assume_yes: bool,
    talk: Console,
) -> list[str]:
    """Name the stack's machines that are stopped, and start them after a question.

    `places` is what `places_in` returns. Without a choice, a yes that nobody was asked for starts
    only what Google itself has stopped: a person may have stopped the others on purpose. Returns
    the URNs of those that are to be replaced. Raises CapacityError and CloudError when one cannot
    be started.
    """
    try:
        found = stopped_machines(google, places)
    except (CloudError, CloudAuthError) as error:
        talk.print(f"warning: it is not known whether every machine runs: {error}")
        return []
    for each in found:
        talk.print(f"machine {each}: its disk, with what is on it, is kept and billed, {_NO_END}")
    idle = [each for each in found if each.status in STOPPED]
    for each in (each for each in found if each not in idle):
        talk.print(f"{each.name}: wait until it has stopped, then repeat: {_UP}")
    if not idle or dry_run:
        return []
    names = ", ".join(each.name for each in idle)
    if choice is None and assume_yes:
        return _start_what_google_stopped(google, idle, talk=talk)
    if choice is None:
        if confirm(f"Start {names}? That is billed again.", assume_yes=False):
            choice = "start"
        elif confirm(f"Replace {names}, and lose what is on its disk?", assume_yes=False):
            choice = "replace"
    if choice == "start":
        start(google, idle, talk=talk)
    elif choice == "replace":
        return [places[each.name, each.zone] for each in idle]
    else:
        talk.print(f"{names}: stopped as before")
    return []


_NO_END = "and Google's limit of its lifetime does not count until it is started"


def _start_what_google_stopped(
    google: Google, idle: Sequence[StoppedMachine], *, talk: Console
) -> list[str]:
    start(google, [each for each in idle if each.by_google], talk=talk)
    for each in idle:
        if not each.by_google:
            talk.print(
                f"warning: {each.name} stays stopped, as a person may have stopped it on purpose. "
                f"Start it with: {_UP} --stopped start; or replace it: {_UP} --stopped replace"
            )
    return []


def start(google: Google, machines: Sequence[StoppedMachine], *, talk: Console) -> None:
    """Start the machines, which keep their disks, and wait until they run.

    Raises CapacityError where their zone has none free, and CloudError.
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
            operation = google.ask(
                what, partial(method, request=request, retry=None, timeout=REQUEST_S)
            )
        begun.append((each, operation, what, place))
    ends = time.monotonic() + _START_S
    for each, operation, what, place in begun:
        with _explained(each):
            see_to_its_end(google, operation, what, operations="Zone", place=place, ends=ends)
        talk.print(f"{each.name}: started, and billed again; its lifetime begins again")
        _renew_label(google, each, talk=talk)


def _renew_label(google: Google, machine: StoppedMachine, *, talk: Console) -> None:
    """Write the new end of a started machine's life on it, where people and `sweep` read it."""
    place = {"zone": machine.zone, "instance": machine.name}
    what = f"{machine.name}: label {EXPIRES_LABEL}"
    try:
        found = ask_compute(google, "Instances", "GetInstanceRequest", what=what, **place)
        limit_s = found.scheduling.max_run_duration.seconds
        if not limit_s:
            return
        expires = str(int(time.time() + limit_s))
        request = request_of(
            "SetLabelsInstanceRequest",
            project=google.project,
            **place,
            instances_set_labels_request_resource={
                "labels": {**found.labels, EXPIRES_LABEL: expires},
                "label_fingerprint": found.label_fingerprint,
            },
        )
        client = google.compute("Instances")
        google.ask(
            what, partial(client.set_labels_unary, request=request, retry=None, timeout=REQUEST_S)
        )
    except (CloudError, CloudAuthError) as error:
        talk.print(f"warning: it still has the time of its first life: {error}")


@contextmanager
def _explained(machine: StoppedMachine) -> Iterator[None]:
    """Say what becomes of the disk where a machine cannot be started."""
    kept = (
        "Its disk stays as it is, and is billed. Repeat later; or lose what is on it: "
        f"{_UP} --stopped replace, or {_DOWN} --without-collect"
    )
    try:
        yield
    except CloudError as error:
        stock_out = find_stock_out(str(error))
        if stock_out is None:
            raise CloudError(f"{error} {kept}") from None
        what = stock_out.machine_type or "such machine"
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
    """Name the stopped machines, and start the head, which has the results, after a question.

    Returns the inventory with the head's external address, which a start changes; None where it was
    not started. Raises ConfigError after a no, and as `start` does.
    """
    try:
        places = {(node.name, node.zone or "") for node in inventory.nodes}
        found = stopped_machines(google, places, own=own)
    except (CloudError, CloudAuthError) as error:
        talk.print(f"warning: it is not known whether every machine runs: {error}")
        return None
    for each in found:
        talk.print(f"machine {each}")
    head = next((each for each in found if each.name == inventory.head.name), None)
    if head is None or head.status not in STOPPED:
        return None
    if dry_run:
        talk.print(f"{head.name} would be started first, to collect what is on its disk")
        return None
    if not confirm(f"Start {head.name} to collect what is on its disk?", assume_yes=assume_yes):
        raise ConfigError(
            f"{head.name} is {head.status}, and results may be on its disk, so nothing was "
            f"destroyed. Destroy them too: {_DOWN} --without-collect"
        )
    start(google, [head], talk=talk)
    node = inventory.head
    if node.external_address is not None:
        node = replace(node, external_address=external_address(_instance(google, node)))
    return replace(inventory, nodes=(node, *inventory.nodes[1:]))


def _instance(google: Google, node: Node) -> Any:
    place = {"zone": node.zone or "", "instance": node.name}
    return ask_compute(google, "Instances", "GetInstanceRequest", what=node.name, **place)


def follow_head(paths: RunPaths, env: Mapping[str, str]) -> str:
    """Write how the head is reached now into the copy of a run; return words where that is new.

    A stop and a start give a machine another external address, and another `accessMode` takes or
    gives one. Empty where nothing is new, or where Google does not say.
    """
    try:
        was = ClusterInventory.load(paths.inventory)
        if was.source != "pulumi" or was.project is None or was.head.instance_id is None:
            return ""
        # Once: whoever waits for the head asks again.
        google = Google(was.project, endpoints=Endpoints.from_env(env), retry_s=0)
        found = _instance(google, was.head)
    except TileforgeError:
        return ""
    address = external_address(found)
    access = Access(kind="direct") if address else Access(kind="iap", project=was.project)
    head = replace(was.head, external_address=address)
    now = replace(was, access=access, nodes=(head, *was.nodes[1:]))
    # Another machine of that name has no part of the run.
    if str(found.id) != head.instance_id or found.status != "RUNNING" or now == was:
        return ""
    write_whole(paths.inventory, now.to_json())
    return (
        f"it is reached {_way(head)} now, not {_way(was.head)}. The run's inventory.json has that "
        "from now on, and the next attempt uses it"
    )


def _way(head: Node) -> str:
    return f"at {head.external_address}" if head.external_address else "through Google's proxy"


def stopped_words(inventory: ClusterInventory, env: Mapping[str, str]) -> list[str]:
    """Return a line for each machine of the inventory that Google has stopped.

    One line says why where Google cannot be asked; none are for clusters that are not Google's.
    """
    if inventory.source != "pulumi" or inventory.project is None:
        return []
    places = {(node.name, node.zone or "") for node in inventory.nodes}
    try:
        google = Google(inventory.project, endpoints=Endpoints.from_env(env))
        found = stopped_machines(google, places)
    except TileforgeError as error:
        return [f"note: it is not known whether its machines run: {error}"]
    return [f"machine {each}. Start it: {_UP}; or collect and destroy: {_DOWN}" for each in found]


def check_machines(google: Google, pulumi: Pulumi) -> Iterator[Check]:
    """Check that the stack's machines run; yields nothing where there is no stack."""
    try:
        places = places_in(stack_state(pulumi), project=google.project)
        found = stopped_machines(google, places)
    except PulumiError as error:
        if error.is_fault:
            yield unknown("machines", error)
        return
    except TileforgeError as error:
        yield unknown("machines", error)
        return
    for each in found:
        why = f" ({each.reason})" if each.reason else ""
        yield Check(
            name=f"machine {each.name}",
            outcome="error",
            found=f"{each.status}{why}; its disk is kept and billed, {_NO_END}",
            fix=f"Start or replace it: {_UP}; or bring its results here and destroy it: {_DOWN}",
            exit_code=ExitCode.PREFLIGHT,
        )
    if places and not found:
        yield Check(name="machines", outcome="ok", found=f"none of {len(places)} is stopped")
