"""Repeats `pulumi up` until it succeeds.

Between attempts, changes the zone or repairs the stack.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from payload.core.errors import ExitCode, TileforgeError
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.filestore_confirmation import MayDelete
from payload.orchestrate.clouds.gcp.resource_kinds import FILESTORE
from payload.orchestrate.clouds.gcp.stock_outs import StockOut
from payload.orchestrate.clouds.pulumi.events import Step, Update, name_of, type_of
from payload.orchestrate.clouds.pulumi.failures import explain, problems_of, stock_out_of
from payload.orchestrate.clouds.pulumi.firewall_drift import reconcile_firewall
from payload.orchestrate.clouds.pulumi.full_zone_records import FULL_HOURS, FullZone, FullZones
from payload.orchestrate.clouds.pulumi.operation_runner import Operations
from payload.orchestrate.clouds.pulumi.orphans import orphans, remove_orphans
from payload.orchestrate.clouds.pulumi.resource_types import INSTANCE
from payload.orchestrate.clouds.pulumi.stack_state import stack_state
from payload.stack.cloud_requirements import Spot

_UP = ("up", "--yes", "--skip-preview")
_EXISTS = ("Error 409", "alreadyExists", "already exists")
_NEEDS_STOP = "requires stopping it"

Saves = Callable[[Sequence[str], str, str], bool]
"""A function that collects results from machines before they are deleted. The arguments are the
machines, the note on what is kept if the user declines, and the question. It returns False if the
user declines."""


@dataclass(slots=True, kw_only=True)
class Builder:
    """Builds or updates the cluster."""

    operations: Operations
    google: Callable[[], Google]
    """Creates the client on demand, because its libraries take a second to import."""
    identity: str
    """The cluster's identity. A resource with this identity that the stack's state lacks was left
    behind by a failed `up`."""
    zones: Sequence[str]
    """Zones in the configuration, tried in order; empty if --next-zone is not set."""
    spot: Spot
    there: Sequence[str]
    """Machines that existed before the build."""
    save: Saves
    may_delete: MayDelete
    full_zones: Path
    """File with the zones that recently had no capacity."""
    replaces: Sequence[str] = ()
    """Pulumi options that let the first attempt replace machines."""
    now_unix: Callable[[], float] = time.time
    _left: list[str] = field(default_factory=list)
    _cleared: bool = False
    _rebuilt: set[str] = field(default_factory=set)

    _zone: str = ""
    """The zone of the next attempt; empty if --next-zone is not set."""
    _tried: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left = list(self.zones[1:])
        self._zone = self.zones[0] if self.zones else ""

    def build(self) -> Update:
        """Run `pulumi up`, and retry after failures. Raises the last error if no retry is left.

        All nodes are in one zone, so changing the zone deletes existing machines, after
        confirmation.
        """
        options, self.replaces = list(self.replaces), ()
        self._skip_full_zones()
        while True:
            update = self.operations.run(*_UP, *options)
            if update.status == 0:
                return update
            options = []
            stock_out = stock_out_of(update, spot=self.spot != "false")
            drifted = drifted_machines(update, done=self._rebuilt)
            if stock_out is not None:
                self._next_zone(update, stock_out)
            elif drifted:
                self._confirm_rebuild(update, drifted)
                options = replacing(step.urn for step in drifted)
            elif self._cleared or not _is_conflict(update) or not self._clear():
                raise self._failed(update)

    def settle_firewall(self, update: Update) -> None:
        """Replace changed firewall rules. Raises CloudError if a rule still differs."""
        reconcile_firewall(self.google(), update, again=self.build, talk=self.operations.talk)

    def _skip_full_zones(self) -> None:
        """Start in the first zone that was not full in the last hours.

        If machines exist, or if all zones were full, keep the order in the configuration.
        """
        if not self.zones or self.there:
            return
        now = self.now_unix()
        full = {each.zone: each for each in FullZones.load(self.full_zones, now_unix=now).zones}
        zone = next((each for each in self.zones if each not in full), None)
        if zone is None or zone == self._zone:
            return
        skipped = [full[each] for each in self.zones[: self.zones.index(zone)]]
        self.operations.talk.print(
            f"--next-zone: building in {zone}; skipping zones that were full within the last "
            f"{FULL_HOURS:g} h: " + ", ".join(each.describe(now_unix=now) for each in skipped)
        )
        self._left = [each for each in self.zones if each != zone and each not in full]
        self._move(zone)

    def _note_full(self, stock_out: StockOut) -> None:
        """Record for the next `up` that the zone is full."""
        now = self.now_unix()
        found = FullZone(zone=self._zone, time_unix=now, reason=stock_out.shown_reason)
        others = FullZones.load(self.full_zones, now_unix=now).without(self._zone)
        FullZones(zones=(*others.zones, found)).save(self.full_zones)

    def _next_zone(self, update: Update, stock_out: StockOut) -> None:
        if self.zones:
            self._note_full(stock_out)
            self._tried.append(self._zone)
        if not self._left:
            if self.spot != "auto":
                raise self._failed(update)
            self._build_on_demand(update, stock_out)
            return
        # Try the zones that Google's message suggests first, then the zones in the configured
        # order.
        zone = min(self._left, key=lambda z: (z not in stock_out.free, self.zones.index(z)))
        self.operations.talk.print(f"{stock_out.describe()}\n--next-zone: building in {zone}")
        question = f"Delete these machines and build in {zone}?"
        if not self.save(self.there, "the cluster stays in its zone", question):
            raise self._failed(update)
        self._left.remove(zone)
        self.there = []
        self._move(zone)

    def _build_on_demand(self, update: Update, stock_out: StockOut) -> None:
        """Switch to on-demand machines, at most one time, and begin with the first configured
        zone."""
        self.operations.talk.print(stock_out.describe())
        question = "Delete these machines and build on-demand machines?"
        if not self.save(self.there, "the machines are kept", question):
            raise self._failed(update)
        self.operations.talk.print(
            "spot: auto: no spot machine is free, so the stack's config now has spot false (on "
            "demand). To try spot machines first for the next cluster: pulumi config set spot auto"
        )
        self.operations.pulumi.ask("config", "set", "spot", "false")
        self.spot, self.there, self._tried = "false", [], []
        # The recorded zones were full only for spot machines.
        FullZones().save(self.full_zones)
        self._left = list(self.zones[1:])
        if self.zones and self._zone != self.zones[0]:
            self._move(self.zones[0])

    def _move(self, zone: str) -> None:
        """Move `zone` to the front of the stack's config, which the cluster program reads."""
        self._zone = zone
        self._set_zones([zone, *(each for each in self.zones if each != zone)])

    def _set_zones(self, order: Sequence[str]) -> None:
        for place, name in enumerate(order):
            self.operations.pulumi.ask("config", "set", "--path", f"zones[{place}]", name)

    def restore_zones(self) -> None:
        """Restore the configured order of zones after a failure, if no machine exists."""
        if not self.zones or self._zone == self.zones[0]:
            return
        with suppress(TileforgeError):  # `up` reports the original failure instead
            if not stack_state(self.operations.pulumi).machines:
                self._set_zones(self.zones)

    def _confirm_rebuild(self, update: Update, drifted: Sequence[Step]) -> None:
        names = [name_of(step.urn) for step in drifted]
        for step in drifted:
            what = ", ".join(step.detailed or step.diffs or ("a setting",))
            self.operations.talk.print(
                f"machine {name_of(step.urn)}: {what} was changed outside Pulumi and can only be "
                "changed back on a stopped machine"
            )
        question = f"Delete and rebuild {', '.join(names)}?"
        if not self.save(names, "it is kept", question):
            raise self._failed(update)
        self._rebuilt |= {step.urn for step in drifted}

    def _clear(self) -> bool:
        """Remove the cluster's resources that the stack's state lacks.

        Returns False if nothing was removed.
        """
        operations = self.operations
        google, state = self.google(), stack_state(operations.pulumi)
        found = orphans(google, state, self.identity)
        self._cleared = True
        data = [each.name for each in found if each.kind == FILESTORE]
        if not self.may_delete(data, kept="it is kept"):
            return False
        return bool(found) and remove_orphans(
            google,
            operations.cluster,
            found,
            assume_yes=operations.assume_yes,
            talk=operations.talk,
        )

    def _failed(self, update: Update) -> TileforgeError:
        error = explain(update, spot=self.spot != "false")
        if len(self._tried) > 1 and stock_out_of(update, spot=self.spot != "false") is not None:
            tried = ", ".join(self._tried)
            error = with_note(error, f"Tried zones of the config: {tried}")
        if self.spot != "false" and error.exit_code == ExitCode.NO_CAPACITY:
            fix = (
                "Spot machines were requested. To use on-demand machines: pulumi config set spot "
                "false"
            )
            error = with_note(error, fix)
        return error


def replacing(urns: Iterable[str]) -> list[str]:
    """Return the options that let Pulumi replace these resources."""
    return [argument for urn in urns for argument in ("--replace", urn)]


def drifted_machines(update: Update, *, done: set[str]) -> list[Step]:
    """Return the failed updates that Google allows only while the machine is stopped."""
    stuck = {each.urn for each in problems_of(update) if _NEEDS_STOP in each.message}
    return [
        step
        for step in update.failures
        if step.urn in stuck - done and type_of(step.urn) == INSTANCE
    ]


def with_note(error: TileforgeError, words: str) -> TileforgeError:
    """Return the error with `words` appended; the exit code stays the same."""
    again = TileforgeError(str(error), fix=words)
    again.exit_code = error.exit_code
    return again


def _is_conflict(update: Update) -> bool:
    return any(text in each.message for each in problems_of(update) for text in _EXISTS)
