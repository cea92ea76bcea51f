"""Shows the progress of an operation as a live table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.table import Table

from payload.orchestrate.clouds.pulumi.events import Event, Step, name_of, type_of
from payload.orchestrate.clouds.pulumi.resource_types import kind_name
from payload.orchestrate.terminal.tables import table

# Descriptions of a resource during and after each operation; other operations change nothing.
_DOING = {
    "create": ("creating", "created"),
    "create-replacement": ("creating again", "created again"),
    "update": ("updating", "updated"),
    "delete": ("deleting", "deleted"),
    "delete-replaced": ("deleting, to be created again", "deleted, to be created again"),
    "import": ("importing", "imported"),
}


@dataclass(slots=True)
class _Row:
    step: Step
    began_s: float
    ended_s: float | None = None
    failed: bool = False
    is_gone: bool = False

    def state(self) -> str:
        """Return the description of the resource's state."""
        if self.is_gone:
            return "gone from Google Cloud"
        doing, done = _DOING[self.step.op]
        if self.failed:
            return f"{doing} FAILED"
        return doing if self.ended_s is None else done


@dataclass(slots=True)
class Progress:
    """The progress of a running operation."""

    shown: str
    say: Callable[[str], object] | None = None
    """Prints a line for each finished resource; None if the terminal shows the live table."""
    clock: Callable[[], float] = time.monotonic
    _rows: dict[tuple[str, str], _Row] = field(default_factory=dict)
    _began_s: float = 0.0

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def handle(self, event: Event) -> None:
        """Update the progress with one event."""
        now_s = self.clock()
        if event.began is not None and event.began.op in _DOING and is_cloud_resource(event.began):
            self._rows[event.began.op, event.began.urn] = _Row(event.began, now_s)
        step = event.done or event.failed
        if step is None:
            return
        row = self._rows.get((step.op, step.urn))
        is_deleted = step.op == "delete" and event.done is not None
        if row is None and is_deleted and is_cloud_resource(step):
            # A deletion that never started: the initial refresh did not find the resource.
            row = self._rows[step.op, step.urn] = _Row(step, now_s, is_gone=True)
        if row is None or row.ended_s is not None:
            return
        row.ended_s, row.failed = now_s, event.failed is not None
        if self.say is not None and (self.shown != "pulumi preview" or row.is_gone):
            took = "" if row.is_gone else f" ({now_s - row.began_s:.0f} s)"
            self.say(f"{kind_name(step.urn)} {name_of(step.urn)}: {row.state()}{took}")

    def to_json(self) -> str:
        """Return the progress as JSON."""
        now_s = self.clock()
        rows = [
            {
                "kind": kind_name(row.step.urn),
                "name": name_of(row.step.urn),
                "state": row.state(),
                "seconds": round((now_s if row.ended_s is None else row.ended_s) - row.began_s, 3),
            }
            for row in self._rows.values()
        ]
        return json.dumps({"schema_version": 1, "resources": rows}, indent=1)

    def table(self) -> Table:
        """Return a table of resources with state and seconds."""
        now_s = self.clock()
        made = table("resource", "name", "state", "s", right=("s",))
        for row in self._rows.values():
            seconds = (now_s if row.ended_s is None else row.ended_s) - row.began_s
            urn = row.step.urn
            made.add_row(kind_name(urn), name_of(urn), row.state(), f"{seconds:.0f}")
        state = "running" if self._rows else "starting"
        made.add_row(self.shown, "", state, f"{now_s - self._began_s:.0f}")
        return made


def is_cloud_resource(step: Step) -> bool:
    """Return whether the step concerns a resource in Google Cloud, not a component or provider."""
    return type_of(step.urn).startswith("gcp:")
