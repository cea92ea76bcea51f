"""Runs Pulumi operations with progress on the terminal, and offers to remove stale locks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live

from payload.core.files import write_whole
from payload.core.one_line import joined_lines
from payload.orchestrate.clouds.cluster_records import cluster_folder
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import Update, name_of
from payload.orchestrate.clouds.pulumi.failures import explain
from payload.orchestrate.clouds.pulumi.locks import Lock, are_stale, is_busy, locks_in
from payload.orchestrate.clouds.pulumi.progress import Progress, is_cloud_resource
from payload.orchestrate.clouds.pulumi.resource_types import kind_name
from payload.orchestrate.terminal.console import confirm
from payload.orchestrate.terminal.tables import table

_PLANNED = {
    "create": "+ create",
    "update": "~ update",
    "delete": "- delete",
    "replace": "± delete and create again",
    "import": "= import",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Runs Pulumi operations on one stack, with progress and prompts."""

    pulumi: Pulumi
    cluster: str
    folder: Path
    talk: Console
    assume_yes: bool
    _printed: set[str] = field(default_factory=set, repr=False)
    """Messages of the cluster program that were printed and must not be printed again: `up` repeats
    the preview's messages."""

    def run(self, *arguments: str) -> Update:
        """Run an operation, show its progress, and return its result.

        A stale lock is removed after confirmation. If the operation fails, print the name of its
        log file. Raises PulumiError; raises KeyboardInterrupt even if only Pulumi was interrupted.
        """
        update = self._once(*arguments)
        if update.status != 0 and not update.diagnostics and is_busy(update.text):
            held = locks_in(update.text)
            if are_stale(held) and self._remove_locks(held):
                update = self._once(*arguments)
        if update.status != 0 and update.is_cancelled:
            raise KeyboardInterrupt
        return update

    def preview(self, *arguments: str) -> Update:
        """Run `pulumi preview` and print the plan. Raises TileforgeError if it fails."""
        update = self.run("preview", *arguments)
        if update.status != 0:
            raise explain(update)
        plan = [step for step in update.steps if step.op in _PLANNED and is_cloud_resource(step)]
        if plan:
            made = table()
            for step in plan:
                differs = ", ".join((step.diffs or ()) if step.op == "update" else ())
                made.add_row(_PLANNED[step.op], kind_name(step.urn), name_of(step.urn), differs)
            self.talk.print(made)
        self.talk.print(f"pulumi preview: {_totals(update) or 'nothing changes'}")
        return update

    def _once(self, *arguments: str) -> Update:
        talk, shown = self.talk, f"pulumi {arguments[0]}"
        log = _log_file(arguments[0], cluster=self.cluster, folder=self.folder)
        if not talk.is_terminal:
            talk.print(f"{shown}: starting; log: {log}")
        progress = Progress(shown, say=None if talk.is_terminal else talk.print)
        with Live(
            get_renderable=progress.table,
            console=talk,
            auto_refresh=talk.is_terminal,
            transient=True,
        ):
            update = self.pulumi.follow(
                *arguments, log=log, on_event=progress.handle, say=talk.print
            )
        write_whole(log.with_suffix(".json"), progress.to_json())
        _print_messages(update, talk=talk, printed=self._printed)
        return update

    def _remove_locks(self, held: Sequence[Lock]) -> bool:
        """Remove stale locks after confirmation; return False if the user declines."""
        holders = ", ".join(map(str, held))
        self.talk.print(
            f"the stack is locked by {holders}, but that process no longer exists. After the lock "
            "is removed, this command searches for resources that the process was creating"
        )
        if not confirm("Remove the lock and continue?", assume_yes=self.assume_yes):
            return False
        self.pulumi.ask("cancel", "--yes")
        return True


def _log_file(operation: str, *, cluster: str, folder: Path) -> Path:
    now = datetime.now(UTC)
    name = f"{operation}-{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03}Z.log"
    return cluster_folder(folder, cluster) / name


def _print_messages(update: Update, *, talk: Console, printed: set[str]) -> None:
    """Print messages of the cluster program and of the policy pack, then the result."""
    messages = [each.message.strip() for each in update.diagnostics if each.severity == "info"]
    messages += [
        f"warning: {each.message.strip()}"
        for each in update.diagnostics
        if each.severity == "warning"
    ]
    messages += [
        f"policy {each.name} ({each.level}): {joined_lines(each.message, longest=None)}"
        for event in update.events
        if (each := event.policy) is not None
    ]
    for message in dict.fromkeys(messages):
        if message not in printed:
            talk.print(message)
    printed.update(messages)
    if update.status != 0:
        talk.print(f"{update.shown} failed; log: {update.log}")
    elif update.arguments[0] != "preview":
        talk.print(f"{update.shown}: {_totals(update) or 'nothing changed'}")


def _totals(update: Update) -> str:
    """Return text such as `12 create, 3 unchanged`; empty if nothing changes."""
    changes: dict[str, int] = {}
    for event in update.events:
        if event.summary is not None:
            changes = dict(event.summary.changes or {})
    same = changes.pop("same", 0)
    if not changes:
        return ""
    counts = [f"{count} {op}" for op, count in sorted(changes.items())]
    return ", ".join([*counts, f"{same} unchanged"])
