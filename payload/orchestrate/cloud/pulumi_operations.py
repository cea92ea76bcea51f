"""Runs Pulumi's operations with a live table, and finds what the stack does not know: orphans."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from payload.core.errors import CloudError
from payload.core.files import write_whole
from payload.core.one_line import joined_lines
from payload.orchestrate.cloud.failures import (
    Lock,
    are_dead,
    explain,
    is_busy,
    kind_in_words,
    locks_in,
)
from payload.orchestrate.cloud.firewall_drift import StackState
from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.listing import list_everything, remove
from payload.orchestrate.cloud.ownership import ownership_of, removable
from payload.orchestrate.cloud.pulumi import Event, Pulumi, Step, Update, name_of, type_of
from payload.orchestrate.cloud.resources import Resource
from payload.orchestrate.cloud.stack_outputs import cluster_folder
from payload.orchestrate.terminal.console import confirm
from payload.orchestrate.terminal.tables import table

# What an operation does to a resource, while it does and afterwards. Others change nothing.
_DOING = {
    "create": ("creating", "created"),
    "create-replacement": ("creating again", "created again"),
    "update": ("updating", "updated"),
    "delete": ("deleting", "deleted"),
    "delete-replaced": ("deleting, to be created again", "deleted, to be created again"),
    "import": ("importing", "imported"),
}
_PLANNED = {
    "create": "+ create",
    "update": "~ update",
    "delete": "- delete",
    "replace": "± delete and create again",
    "import": "= import",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Pulumi's operations on one stack, for an operator who watches and is asked."""

    pulumi: Pulumi
    cluster: str
    folder: Path
    talk: Console
    assume_yes: bool
    _told: set[str] = field(default_factory=set, repr=False)
    """Messages of the cluster program that were printed: after the preview it repeats its own."""

    def run(self, *words: str) -> Update:
        """Run an operation, show its progress, and return how it ended.

        A lock whose process is dead is removed after a question. On a failure the name of the log
        file is printed. Raises PulumiError, and KeyboardInterrupt also where an interrupt reached
        Pulumi alone.
        """
        update = self._once(*words)
        if update.status != 0 and not update.diagnostics and is_busy(update.text):
            held = locks_in(update.text)
            if are_dead(held) and self._breaks(held):
                update = self._once(*words)
        if update.status != 0 and update.is_cancelled:
            raise KeyboardInterrupt
        return update

    def preview(self, *words: str) -> Update:
        """Run `pulumi preview` and print the plan. Raises the error that a failure amounts to."""
        update = self.run("preview", *words)
        if update.status != 0:
            raise explain(update)
        plan = [step for step in update.steps if step.op in _PLANNED and _is_real(step)]
        if plan:
            made = table()
            for step in plan:
                differs = ", ".join((step.diffs or ()) if step.op == "update" else ())
                made.add_row(_PLANNED[step.op], kind_in_words(step.urn), name_of(step.urn), differs)
            self.talk.print(made)
        self.talk.print(f"pulumi preview: {_in_all(update) or 'nothing changes'}")
        return update

    def _once(self, *words: str) -> Update:
        talk, shown = self.talk, f"pulumi {words[0]}"
        log = _log_file(words[0], cluster=self.cluster, folder=self.folder)
        if not talk.is_terminal:
            talk.print(f"{shown}: starting; its output goes to {log}")
        progress = Progress(shown, say=None if talk.is_terminal else talk.print)
        with Live(
            get_renderable=progress.table,
            console=talk,
            auto_refresh=talk.is_terminal,
            transient=True,
        ):
            update = self.pulumi.follow(*words, log=log, see=progress.see, say=talk.print)
        write_whole(log.with_suffix(".json"), progress.to_json())
        _conclude(update, talk=talk, told=self._told)
        return update

    def _breaks(self, held: Sequence[Lock]) -> bool:
        """Remove the lock of a dead process, after a question; False after a no."""
        holders = ", ".join(map(str, held))
        self.talk.print(
            f"the stack is locked by {holders}: that process is gone, so its operation was broken "
            "off, and what it was creating is looked for afterwards"
        )
        if not confirm("Remove the lock and go on?", assume_yes=self.assume_yes):
            return False
        self.pulumi.ask("cancel", "--yes")
        return True


@dataclass(slots=True)
class _Row:
    step: Step
    began_s: float
    ended_s: float | None = None
    failed: bool = False
    is_gone: bool = False

    def state(self) -> str:
        """Return the state in words."""
        if self.is_gone:
            return "gone from Google Cloud"
        doing, done = _DOING[self.step.op]
        if self.failed:
            return f"{doing} FAILED"
        return doing if self.ended_s is None else done


@dataclass(slots=True)
class Progress:
    """Progress of an operation so far."""

    shown: str
    say: Callable[[str], object] | None = None
    """Gets a line for each resource that is done; None where the table is on a terminal."""
    clock: Callable[[], float] = time.monotonic
    _rows: dict[tuple[str, str], _Row] = field(default_factory=dict)
    _began_s: float = 0.0

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def see(self, event: Event) -> None:
        """Take in one event."""
        now_s = self.clock()
        if event.began is not None and event.began.op in _DOING and _is_real(event.began):
            self._rows[event.began.op, event.began.urn] = _Row(event.began, now_s)
        step = event.done or event.failed
        if step is None:
            return
        row = self._rows.get((step.op, step.urn))
        if row is None and step.op == "delete" and event.done is not None and _is_real(step):
            # No deletion was begun: the refresh before everything else has not found it.
            row = self._rows[step.op, step.urn] = _Row(step, now_s, is_gone=True)
        if row is None or row.ended_s is not None:
            return
        row.ended_s, row.failed = now_s, event.failed is not None
        if self.say is not None and (self.shown != "pulumi preview" or row.is_gone):
            took = "" if row.is_gone else f" ({now_s - row.began_s:.0f} s)"
            self.say(f"{kind_in_words(step.urn)} {name_of(step.urn)}: {row.state()}{took}")

    def to_json(self) -> str:
        """Return the same for programs."""
        now_s = self.clock()
        rows = [
            {
                "kind": kind_in_words(row.step.urn),
                "name": name_of(row.step.urn),
                "state": row.state(),
                "seconds": round((now_s if row.ended_s is None else row.ended_s) - row.began_s, 3),
            }
            for row in self._rows.values()
        ]
        return json.dumps({"schema_version": 1, "resources": rows}, indent=1)

    def table(self) -> Table:
        """Return the table of resource, state and seconds."""
        now_s = self.clock()
        made = table("resource", "name", "state", "s", right=("s",))
        for row in self._rows.values():
            seconds = (now_s if row.ended_s is None else row.ended_s) - row.began_s
            urn = row.step.urn
            made.add_row(kind_in_words(urn), name_of(urn), row.state(), f"{seconds:.0f}")
        state = "running" if self._rows else "starting"
        made.add_row(self.shown, "", state, f"{now_s - self._began_s:.0f}")
        return made


def _is_real(step: Step) -> bool:
    """Tell whether it is something in Google Cloud, and no component or provider."""
    return type_of(step.urn).startswith("gcp:")


def _log_file(word: str, *, cluster: str, folder: Path) -> Path:
    now = datetime.now(UTC)
    name = f"{word}-{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03}Z.log"
    return cluster_folder(folder, cluster) / name


def _conclude(update: Update, *, talk: Console, told: set[str]) -> None:
    """Print what the cluster program and the policy pack say, and where the output is."""
    said = [each.message.strip() for each in update.diagnostics if each.severity == "info"]
    said += [
        f"warning: {each.message.strip()}"
        for each in update.diagnostics
        if each.severity == "warning"
    ]
    said += [
        f"policy {each.name} ({each.level}): {joined_lines(each.message, longest=None)}"
        for event in update.events
        if (each := event.policy) is not None
    ]
    for message in dict.fromkeys(said):
        if message not in told:
            talk.print(message)
    told.update(said)
    if update.status != 0:
        talk.print(f"{update.shown} failed; its output is in {update.log}")
    elif update.words[0] != "preview":
        talk.print(f"{update.shown}: {_in_all(update) or 'nothing changed'}")


def _in_all(update: Update) -> str:
    """Return `12 to create, 3 unchanged` or `12 created`; empty where nothing was touched."""
    changes: dict[str, int] = {}
    for event in update.events:
        if event.summary is not None:
            changes = dict(event.summary.changes or {})
    same = changes.pop("same", 0)
    if not changes:
        return ""
    words = [f"{count} {op}" for op, count in sorted(changes.items())]
    return ", ".join([*words, f"{same} unchanged"])


def orphans(google: Google, state: StackState, identity: str) -> list[Resource]:
    """Return what carries the cluster's identity and is not in the stack's state.

    A boot disk goes with its machine, so it counts only when that is gone. Raises CloudError when
    not everything could be listed.
    """
    listing = list_everything(google)
    if listing.blind:
        raise CloudError(f"what the cluster has is not all seen: {'; '.join(listing.blind)}")
    own = ownership_of(state, identity, project=google.project)
    stack = ownership_of(state, project=google.project)
    machines = {(each.name, each.location) for each in listing.resources if each.kind == "instance"}
    return [
        each
        for each in removable(filter(own.owns, listing.resources))
        if not stack.lists(each)
        and not (each.kind == "disk" and (each.name, each.location) in machines)
    ]


def remove_orphans(
    google: Google,
    cluster: str,
    found: Sequence[Resource],
    *,
    assume_yes: bool,
    talk: Console,
) -> bool:
    """List the orphans, ask, and remove them; False after a no. Raises CloudError if one stays."""
    names = ", ".join(f"{each.kind} {each.name}" for each in found)
    talk.print(f"in Google Cloud with the identity of {cluster}, but not in the stack: {names}")
    if not confirm(f"Remove these {len(found)}, to build them again?", assume_yes=assume_yes):
        return False
    failed = remove(google, found)
    if failed:
        raise CloudError(f"not everything was removed: {'; '.join(failed)}")
    return True
