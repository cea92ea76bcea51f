"""Pulumi's operations, run with progress on the terminal and questions about a lock in the way."""

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
from payload.orchestrate.clouds.pulumi.locks import Lock, are_dead, is_busy, locks_in
from payload.orchestrate.clouds.pulumi.progress import Progress, is_real
from payload.orchestrate.clouds.pulumi.resource_types import kind_in_words
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
        plan = [step for step in update.steps if step.op in _PLANNED and is_real(step)]
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
