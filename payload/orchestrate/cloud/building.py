"""`pulumi up` until it is done: other zones, orphans, drifted machines, open firewall rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from payload.errors import CapacityError, TileforgeError
from payload.orchestrate.cloud.failures import explain, problems_of, stock_out_of
from payload.orchestrate.cloud.firewall import settle
from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.machines import INSTANCE, StackState, stack_state
from payload.orchestrate.cloud.operations import Operations
from payload.orchestrate.cloud.ownership import orphans, remove_orphans
from payload.orchestrate.cloud.pulumi_events import Step, Update, name_of, type_of
from payload.orchestrate.cloud.stock_out import StockOut

_UP = ("up", "--yes", "--skip-preview")
_EXISTS = ("Error 409", "alreadyExists", "already exists")
_NEEDS_STOP = "requires stopping it"

Saves = Callable[[Sequence[str], str, str], bool]
"""Collects the results on these machines before they end; False after a no. The other two are what
stays as it is otherwise, and the question."""


@dataclass(slots=True, kw_only=True)
class Builder:
    """Builds the cluster, or brings it up to date."""

    operations: Operations
    google: Callable[[], Google]
    """Made when it is needed: its libraries take a second to import."""
    zones: Sequence[str]
    """Of the config, to try in turn; empty without --next-zone."""
    spot: bool
    there: Sequence[str]
    """Machines that were up before."""
    save: Saves
    _left: list[str] = field(default_factory=list)
    _cleared: bool = False
    _rebuilt: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._left = list(self.zones[1:])

    def build(self) -> Update:
        """Run `pulumi up` until it succeeds. Raises the error that it amounts to otherwise.

        All nodes are in one zone, so another one ends the machines that were there: that is asked.
        """
        more: list[str] = []
        while True:
            update = self.operations.run(*_UP, *more)
            if update.status == 0:
                return update
            more = []
            stock_out = stock_out_of(update)
            drifted = drifted_machines(update, done=self._rebuilt)
            if stock_out is not None:
                self._next_zone(update, stock_out)
            elif drifted:
                self._ask_to_rebuild(update, drifted)
                more = [word for step in drifted for word in ("--replace", step.urn)]
            elif self._cleared or not _says_exists(update) or not self._clear():
                raise self._failed(update)

    def settle_firewall(self, update: Update) -> None:
        """Compare the firewall with the program's. Raises CloudError when a rule stays open."""
        settle(self.google(), update, again=self.build, talk=self.operations.talk)

    def _next_zone(self, update: Update, stock_out: StockOut) -> None:
        if not self._left:
            raise self._failed(update)
        # One that the error says has capacity goes first; else the order of the config.
        zone = min(self._left, key=lambda z: (z not in stock_out.free, self.zones.index(z)))
        self.operations.talk.print(
            f"{stock_out.describe()}\n--next-zone: the cluster goes to {zone} now"
        )
        question = f"End these machines and build in {zone}?"
        if not self.save(self.there, "the cluster stays in its zone", question):
            raise self._failed(update)
        self._left.remove(zone)
        self.there = []
        self._move(zone)

    def _move(self, zone: str) -> None:
        """Put `zone` first in the stack's config."""
        order = [zone, *(each for each in self.zones if each != zone)]
        for place, name in enumerate(order):
            self.operations.pulumi.ask("config", "set", "--path", f"zones[{place}]", name)

    def _ask_to_rebuild(self, update: Update, drifted: Sequence[Step]) -> None:
        names = [name_of(step.urn) for step in drifted]
        for step in drifted:
            what = ", ".join(step.detailed or step.diffs or ("a setting",))
            self.operations.talk.print(
                f"machine {name_of(step.urn)}: {what} was changed outside Pulumi, and Google "
                "changes it on a stopped machine only"
            )
        question = f"End {', '.join(names)} and build it again?"
        if not self.save(names, "it stays as it is", question):
            raise self._failed(update)
        self._rebuilt |= {step.urn for step in drifted}

    def _clear(self) -> bool:
        """Remove what Google has of the cluster and the stack has not; False for nothing."""
        operations = self.operations
        google, state = self.google(), stack_state(operations.pulumi)
        found = orphans(google, operations.cluster, state)
        self._cleared = True
        return bool(found) and remove_orphans(
            google,
            operations.cluster,
            found,
            state=state,
            folder=operations.folder,
            assume_yes=operations.assume_yes,
            talk=operations.talk,
        )

    def _failed(self, update: Update) -> TileforgeError:
        error = explain(update)
        if not isinstance(error, CapacityError):
            return error
        tried = self.zones[: len(self.zones) - len(self._left)]
        if len(tried) > 1:
            error = with_words(error, f"Zones of the config that were tried: {', '.join(tried)}")
        if self.spot:
            words = "Those were spot machines; for on-demand ones: pulumi config set spot false"
            error = with_words(error, words)
        return error


def drifted_machines(update: Update, *, done: set[str]) -> list[Step]:
    """Return the failed updates of machines that only a stopped machine can take."""
    stuck = {each.urn for each in problems_of(update) if _NEEDS_STOP in each.message}
    return [
        step
        for step in update.failures
        if step.urn in stuck - done and type_of(step.urn) == INSTANCE
    ]


def with_words(error: TileforgeError, words: str) -> TileforgeError:
    """Return the error with another sentence and the same exit code."""
    again = TileforgeError(f"{str(error).rstrip('.')}. {words}")
    again.exit_code = error.exit_code
    return again


def remaining(state: StackState, update: Update | None) -> str:
    """Return in words which machines are there, and what they cost an hour as far as is known."""
    if not state.machines:
        return "no machine is there"
    prices = _node_prices(update)
    usd = sum(prices.get(name, 0.0) for name in state.machines)
    cost = f", ${usd:.2f}/h" if usd else ""
    return f"{len(state.machines)} machine(s) are there{cost}: {', '.join(state.machines)}"


def _node_prices(update: Update | None) -> dict[str, float]:
    """Return the prices in the stack's outputs that a preview expects; what is damaged is left."""
    inventory = update.outputs.get("inventory") if update is not None else None
    nodes = inventory.get("nodes") if isinstance(inventory, dict) else None
    return {
        each["name"]: float(each["hourly_usd"])
        for each in (nodes if isinstance(nodes, list) else [])
        if isinstance(each, dict)
        and isinstance(each.get("name"), str)
        and type(each.get("hourly_usd")) in (int, float)
    }


def _says_exists(update: Update) -> bool:
    return any(word in each.message for each in problems_of(update) for word in _EXISTS)
